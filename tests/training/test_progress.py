"""What a run says that somebody has stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.log import Log
from training.checkpoint.folder import RECORD, step_folder
from training.config.keys import TrainConfig
from training.progress import Progress

pytestmark = pytest.mark.usefixtures("group")

UNSAVED = "stopped after step 7 of 10, which could not be saved; the same command goes on"


@pytest.mark.parametrize(
    ("step", "kept", "message"),
    [
        (7, [5, 7], "stopped after step 7 of 10; the same command goes on from there: {folder}/step-000007"),
        (7, [3, 5], f"{UNSAVED} from {{folder}}/step-000005"),
        (7, [], f"{UNSAVED} from the beginning"),
        (0, [], "stopped before step 1 of 10: this start trained nothing; the same command goes on from the beginning"),
    ],
)
def test_who_is_stopped_names_the_checkpoint_that_there_is(
    step: int, kept: list[int], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in kept:
        step_folder(tmp_path, number).mkdir()
        (step_folder(tmp_path, number) / RECORD).touch()
    config = TrainConfig(model_path="m", data_path="d", save_path=str(tmp_path), train_batch_size=1)
    order: Any = None
    progress = Progress(config, Log(highlight=False, width=500), None, None, order, 10, False)
    stop: Any = SimpleNamespace(preempted=False, exit_code=128 + signal.SIGTERM)
    with pytest.raises(SystemExit) as leaving:
        progress.leave(step, stop)
    assert leaving.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().out == message.format(folder=tmp_path) + "\n"

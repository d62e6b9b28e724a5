"""A start cleans up after one that was killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from common.log import Log
from models.checkpoint.publish import hidden_folder
from tests.accidents import killed_at
from tests.training.checkpoint.test_folder import flip, whole
from training.checkpoint.folder import Best, step_folder
from training.checkpoint.run_folder import find_checkpoint, make_room
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.errors import ConfigError, RunRefused

pytestmark = pytest.mark.usefixtures("group")


def begin_save(save_path: Path) -> None:
    with hidden_folder(step_folder(save_path, 20)) as new:
        whole(new, 20)


def test_what_a_killed_save_left_is_removed_and_the_rest_stays(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        whole(tmp_path, step)
    assert killed_at("shutil.rmtree", 1, lambda: begin_save(tmp_path)) == signal.SIGKILL
    (tmp_path / "notes.txt").write_text("mine")
    best = Best(checkpoint="step-000003", step=3, measure="eval_loss", value=1.0)
    make_room(tmp_path, 2, best, Disk.shared(), Log(quiet=True, highlight=False))
    assert {path.name for path in tmp_path.iterdir()} == {"step-000003", "step-000009", "step-000012", "notes.txt"}


@pytest.mark.parametrize("named", ["step-000003", "step-000009", None], ids=["earlier", "set aside", "nothing"])
def test_latest_names_the_checkpoint_that_a_start_resumes(named: str | None, tmp_path: Path) -> None:
    """A kill between the new name and `latest` left it where it was."""
    for step in (3, 6, 9):
        whole(tmp_path, step)
    flip(tmp_path / "step-000009" / "config.json")
    if named:
        (tmp_path / "latest").write_text(named)
    config = TrainConfig(model_path="m", data_path="d", save_path=str(tmp_path), train_batch_size=1)
    found = find_checkpoint(config, tmp_path, Disk.shared(), Log(quiet=True, highlight=False))
    assert found == tmp_path / "step-000006"
    assert (tmp_path / "latest").read_text() == "step-000006"


def test_a_start_neither_overwrites_checkpoints_nor_resumes_from_a_damaged_one(tmp_path: Path) -> None:
    folder = whole(tmp_path, 3)
    keys = {"model_path": "m", "data_path": "d", "save_path": str(tmp_path), "train_batch_size": 1}
    disk, log = Disk.shared(), Log(quiet=True, highlight=False)
    with pytest.raises(RunRefused, match=r"save_path: .* holds step-000003 of another run or a later step"):
        find_checkpoint(TrainConfig.model_validate(keys | {"resume": "none"}), tmp_path, disk, log)
    flip(folder / "config.json")
    with pytest.raises(ConfigError, match=r"resume: .*step-000003: config\.json is damaged"):
        find_checkpoint(TrainConfig.model_validate(keys | {"resume": str(folder)}), tmp_path, disk, log)

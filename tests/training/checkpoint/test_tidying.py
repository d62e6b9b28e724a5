"""What a start removes that the one before was killed too soon to remove."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from common.log import Log
from models.checkpoint.publish import workplace
from tests.accidents import killed_at
from tests.training.checkpoint.test_folder import whole
from training.checkpoint.folder import Best, step_folder
from training.checkpoint.tidying import make_room
from training.distributed.disk import Disk

pytestmark = pytest.mark.usefixtures("group")


def begin_save(save_path: Path) -> None:
    with workplace(step_folder(save_path, 20)) as new:
        whole(new, 20)


def test_what_a_killed_save_left_goes_and_what_was_to_stay_stays(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        whole(tmp_path, step)
    assert killed_at("shutil.rmtree", 1, lambda: begin_save(tmp_path)) == signal.SIGKILL
    (tmp_path / "notes.txt").write_text("mine")
    best = Best(checkpoint="step-000003", step=3, eval_loss=1.0)
    make_room(tmp_path, 2, best, Disk.of_all(), Log(highlight=False))
    assert {path.name for path in tmp_path.iterdir()} == {"step-000003", "step-000009", "step-000012", "notes.txt"}

"""A disk that is full when a run starts, or starts again: one line, and nothing lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from models.checkpoint.publish import hidden_folder
from tests.accidents import killed_at
from tests.conftest import write_records
from tests.disks import fill, small_disk
from tests.launching import error_lines, metrics, supervised, topology, write_config
from training.checkpoint.folder import RECORD, step_folder

pytestmark = [pytest.mark.launched, pytest.mark.slow]


def test_a_full_disk_at_the_start_and_at_the_next(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    write_records(tmp_path / "data.json", 16)
    with small_disk(tmp_path / "disk", 32) as (disk, may_fill):
        if not may_fill:
            pytest.skip("this machine does not let a test mount a file system")
        config = write_config(
            tmp_path / "run.yml",
            model_path=str(make_checkpoint("llama")),
            data_path=str(tmp_path / "data.json"),
            save_path=str(disk / "run"),
            model_topo=topology((2, 1)),
            save_interval=1,
        )
        start = (2, "train_ds.py", "--config", config)
        filler = fill(disk)
        refused = supervised(1, *start[1:], "model_topo.process_topology.dims=[1, 1]")
        assert_one_line(refused.stderr, error_lines(refused), refused.returncode)
        filler.unlink()
        assert supervised(*start).returncode == 0
        steps = len(metrics(disk / "run"))
        files = contents(disk / "run")

        filler = fill(disk)
        longer = supervised(*start, f"max_steps={steps + 2}", "n_epoches=3")
        assert_one_line(longer.stderr, error_lines(longer), longer.returncode)
        assert {path: data for path, data in contents(disk / "run").items() if path in files} == files
        filler.unlink()
        left_by_a_kill(disk / "run")
        again = supervised(*start, f"max_steps={steps + 2}", "n_epoches=3")
        assert again.returncode == 0, again.stdout + again.stderr
        assert [line["step"] for line in metrics(disk / "run")] == list(range(1, steps + 3))


def assert_one_line(stderr: str, errors: list[str], code: int) -> None:
    assert code != 0
    assert len(errors) == 1 and "No space left on device" in errors[0], stderr
    assert "Traceback" not in stderr


def left_by_a_kill(run_folder: Path) -> None:
    """The files of a save that was under way take nearly all the room."""

    def save() -> None:
        with hidden_folder(step_folder(run_folder, 9)) as new:
            filler = fill(new)
            os.truncate(filler, filler.stat().st_size - 2**18)

    assert killed_at("shutil.rmtree", 1, save) == signal.SIGKILL


def contents(run_folder: Path) -> dict[Path, bytes]:
    """Of the files of whole checkpoints."""
    folders = [record.parent for record in run_folder.glob(f"step-*/{RECORD}")]
    return {path: path.read_bytes() for folder in folders for path in folder.iterdir()}

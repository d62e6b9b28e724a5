"""TensorBoard's event files, read back by TensorBoard itself."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cases import tiered
from tests.disks import small_disk
from tests.launching import run
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.metrics import tracking
from training.metrics.reporter import Reporter, read_metrics
from training.metrics.tracking import TensorBoardTracker, open_trackers


def make_config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 4} | sections
    )


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: for each curve its steps and values."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def log(folder: Path, first: int, *losses: float) -> None:
    """Log one loss a step from step `first` on."""
    writer = TensorBoardTracker(folder, max(first, 1))
    for step, loss in enumerate(losses, first):
        writer.log(step, {"loss": loss, "times/data": 0.5})
    writer.close(failed=False)


def test_tensorboard_reads_what_was_written_nan_and_infinity_too(tmp_path: Path) -> None:
    log(tmp_path, 1, 4.0, math.nan, math.inf)
    found = curves(tmp_path)
    assert found["times/data"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert found["loss"] == [(1, 4.0), (2, pytest.approx(math.nan, nan_ok=True)), (3, math.inf)]


@pytest.mark.parametrize(
    ("starts", "shown"),
    [
        pytest.param([(1, 1.0, 2.0, 3.0), (2, 7.0, 8.0)], [(1, 1.0), (2, 7.0), (3, 8.0)], id="resumed"),
        pytest.param([(0, 9.0, 8.0), (0, 3.0)], [(0, 3.0)], id="a new run, which evaluates before its first step"),
    ],
)
def test_repeated_steps_hide_those_of_earlier_starts(
    starts: list[tuple[int, float]], shown: list[tuple[int, float]], tmp_path: Path
) -> None:
    for start in starts:
        log(tmp_path, *start)
        time.sleep(1.1)  # event files are read in the order of the second in their names
    assert curves(tmp_path)["loss"] == shown


def test_a_step_and_its_evaluation_are_curves_of_their_own(tmp_path: Path) -> None:
    with Reporter(tmp_path, 3, 1, trackers=open_trackers(make_config(), tmp_path, 1)) as reporter:
        reporter.report_evaluation(2, {"eval_loss": 1.5, "eval_loss/instruct": 1.25})
    assert curves(tmp_path) == {"eval_loss": [(2, 1.5)], "eval_loss/instruct": [(2, 1.25)]}


def test_what_is_off_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # importing it would fail
    spec = importlib.util.spec_from_file_location("tracking_anew", tracking.__file__)
    assert spec is not None
    assert spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    assert anew.open_trackers(make_config(tensorboard={"enabled": False}), tmp_path, 1) == []


# Reports steps while its disk is full, and after there is room again; the first word says from when on it is full.
FULL = """
import sys, time
from pathlib import Path
from tests.disks import fill
from tests.training.metrics.test_tracking import make_config
from models.checkpoint.publish import writing
from training.errors import exit_with_one_line
from training.metrics.reporter import Reporter, read_metrics
from training.metrics.tracking import open_trackers
folder, when = Path(sys.argv[2]), sys.argv[1]
with exit_with_one_line():
    filler = fill(folder) if when == "the start" else None
    with writing(folder):
        trackers = open_trackers(make_config(), folder, 1)
        reporter = Reporter(folder, 900, 100, trackers=trackers)
    with reporter:
        for step in range(1, 901):
            if step == 3 and not filler:
                filler = fill(folder)
            if step == 600 and when == "a while":
                filler.unlink()
            reporter.report_evaluation(step, {f"eval_loss/{number}": 1.0 for number in range(20)})
            time.sleep(0.002)
"""


@pytest.mark.parametrize("when", tiered(["the start", "the end", "a while"], quick=["the start"]))
def test_a_full_disk_is_reported_once_without_a_traceback(when: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as (disk, may_fill):
        if not may_fill:
            pytest.skip("this machine does not let a test mount a file system")
        done = run(sys.executable, "-c", FULL, when, disk)
        printed = done.stdout + done.stderr
        assert "Traceback" not in printed and "Exception" not in printed, printed
        if when == "the start":
            assert done.returncode == 2, printed
            assert done.stderr.count("\n") == 1 and "cannot be written: No space left on device" in done.stderr, printed
            return
        assert "step 900/900" in done.stdout and done.returncode == 0, printed
        assert printed.count("tensorboard: ") == 1 and printed.count("No space left on device") == 2, printed
        if when == "a while":
            assert len(read_metrics(disk / "metrics.jsonl")) == 900


def test_a_missing_package_is_the_user_s_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    told = "trackers: the package tensorboard is not installed; expected pip install tensorboard, or no tensorboard"
    with pytest.raises(ConfigError, match=told):
        make_config().check_packages()


@pytest.mark.parametrize(
    ("keys", "named"),
    [({}, ["tensorboard"]), ({"tensorboard": False}, []), ({"tensorboard": {"enabled": True}}, ["tensorboard"])],
)
def test_the_section_adds_to_the_trackers_or_takes_out_of_them(keys: dict[str, Any], named: list[str]) -> None:
    assert make_config(**keys).trackers == named


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(ValueError, match="trackers: expected some of tensorboard, found xyz"):
        make_config(trackers=["xyz"])

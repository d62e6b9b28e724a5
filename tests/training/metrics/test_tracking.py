"""TensorBoard's event files, read back by TensorBoard itself; W&B, by a stand-in for its package."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.disks import small_disk
from tests.launching import run
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.metrics import tracking
from training.metrics.reporter import Reporter, read_metrics
from training.metrics.tracking import TensorBoardWriter, WandBWriter, open_trackers


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
    writer = TensorBoardWriter(folder, max(first, 1))
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


def test_tensorboard_is_on_by_default_and_wandb_is_not(tmp_path: Path) -> None:
    trackers = open_trackers(make_config(), tmp_path, 1)
    for tracker in trackers:
        tracker.close(failed=False)
    assert [tracker.name for tracker in trackers] == ["tensorboard"]
    assert open_trackers(make_config(tensorboard={"enabled": False}), tmp_path, 1) == []


def test_what_is_off_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it would fail
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


@pytest.mark.parametrize("when", ["the start", "the end", "a while"])
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


class FakeWandB(ModuleType):
    """The part of the package that Pipetune calls; it remembers the calls."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__("wandb")
        self.began: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []
        self.fails = fails

    def init(self, **settings: Any) -> FakeWandB:
        if self.fails:
            raise RuntimeError("api_key not configured (no-tty).\ncall wandb.login")
        self.began.append(settings)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    module = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


WANDB = {"enabled": True, "project": "llamas", "name": "first try"}


def test_wandb_gets_config_numbers_and_the_end(tmp_path: Path, wandb: FakeWandB) -> None:
    config = make_config(wandb=WANDB, tensorboard={"enabled": False})
    (tracker,) = open_trackers(config, tmp_path, 1)
    tracker.log(1, {"loss": 2.5})
    tracker.close(failed=True)
    (began,) = wandb.began
    assert (began["project"], began["name"], began["dir"]) == ("llamas", "first try", str(tmp_path))
    assert began["config"] == config.dump()
    assert wandb.logged == [(1, {"loss": 2.5})]
    assert wandb.exit_codes == [1]


def test_wandb_continues_a_resumed_run(tmp_path: Path, wandb: FakeWandB) -> None:
    config = make_config(wandb=WANDB)
    for first_step in (1, 5, 9, 1):
        WandBWriter(tmp_path, first_step, config)
    first, second, third, new = (began["id"] for began in wandb.began)
    assert first == second == third != new
    assert {began["resume"] for began in wandb.began} == {"allow"}


@pytest.mark.parametrize("folder_of_that_name", [False, True])
def test_a_missing_package_is_one_line(
    folder_of_that_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B leaves folders named wandb wherever it ran, and Python would import them as empty packages."""
    if folder_of_that_name:
        (tmp_path / "wandb").mkdir()
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb\.enabled: the package wandb is not installed; expected pip install"):
        open_trackers(make_config(wandb=WANDB), tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()


def test_a_missing_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB(fails=True))
    with pytest.raises(ConfigError) as caught:
        open_trackers(make_config(wandb=WANDB), tmp_path, 1)
    assert str(caught.value) == (
        "wandb: cannot begin a run: api_key not configured (no-tty). call wandb.login; "
        "expected wandb login, WANDB_MODE=offline, or enabled: false"
    )

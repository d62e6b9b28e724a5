"""TensorBoard's event files, read back by TensorBoard itself; the other trackers, by stand-ins and as they are."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import FAQ, ROOT
from tests.disks import small_disk
from tests.environments import environment
from tests.launching import DEEPSPEED, error_lines, run, write_config
from training.config.keys import TrainConfig
from training.config.section import leaves
from training.errors import ConfigError
from training.metrics import tracking
from training.metrics.reporter import Reporter, read_metrics
from training.metrics.tracking import TRACKERS, TensorBoardTracker, open_trackers


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
    writer = TensorBoardTracker(make_config(), folder, max(first, 1))
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
    for package in TRACKERS:
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


class FakeTracker(ModuleType):
    """The part of a package that Pipetune calls; it remembers the calls.

    Attributes:
        began: project, name, id and config of each start.
        logged: the steps and their numbers.
        ended: whether each end was a failure.
    """

    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, origin="a stand-in")
        self.began: list[tuple[Any, Any, Any, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[bool] = []
        self.fails = fails

    def begin(self, project: str, name: str | None, id: str | None, config: dict[str, Any]) -> None:
        if self.fails:
            raise RuntimeError("api_key not configured (no-tty).\ncall login")
        self.began.append((project, name, id, config))

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))


class FakeWandB(FakeTracker):
    def init(self, dir: str, resume: str, **settings: Any) -> FakeWandB:
        assert resume == "allow" and Path(dir).is_dir()
        self.begin(**settings)
        return self

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code == 1)


class FakeSwanLab(FakeTracker):
    def Settings(self, interactive: bool) -> bool:  # noqa: N802 (the package's name)
        return interactive

    def init(self, log_dir: str, resume: str, settings: bool, **about: Any) -> FakeSwanLab:
        assert (resume, settings) == ("allow", False) and Path(log_dir).parent.is_dir()
        self.begin(**about)
        return self

    def finish(self, state: str = "success", error: str | None = None) -> None:
        assert (state == "crashed") == bool(error)
        self.ended.append(state == "crashed")


class FakeMLflow(FakeTracker):
    def set_experiment(self, name: str) -> None:
        self.project, self.params = name, dict[str, Any]()

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> Any:
        run_id = run_id or f"run{len(self.began)}"
        self.begin(self.project, run_name, run_id, self.params)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_params(self, params: dict[str, Any]) -> None:
        assert len(params) <= 100
        self.params.update(params)

    def log_metrics(self, numbers: dict[str, float], step: int, synchronous: bool) -> Any:
        assert not synchronous
        self.log(numbers, step)
        return SimpleNamespace(wait=lambda: None)

    def end_run(self, status: str) -> None:
        self.ended.append(status == "FAILED")


FAKES: dict[str, type[FakeTracker]] = {"wandb": FakeWandB, "swanlab": FakeSwanLab, "mlflow": FakeMLflow}
each = pytest.mark.parametrize("name", FAKES)


def fake(name: str, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> FakeTracker:
    module = FAKES[name](name, fails)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@each
def test_a_tracker_gets_config_numbers_and_the_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = fake(name, monkeypatch)
    config = make_config(trackers=[name], **{name: {"project": "llamas", "name": "first try"}})
    config.check_packages()
    (tracker,) = open_trackers(config, tmp_path, 1)
    tracker.log(1, {"loss": 2.5})
    tracker.close(failed=True)
    ((project, title, _, logged),) = package.began
    assert (project, title) == ("llamas", "first try")
    assert logged == (dict(leaves(config.dump())) if name == "mlflow" else config.dump())
    assert package.logged == [(1, {"loss": 2.5})]
    assert package.ended == [True]


@each
def test_a_tracker_goes_on_with_the_run_that_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fake(name, monkeypatch)
    for first_step in (1, 5, 9, 1):
        TRACKERS[name](make_config(trackers=[name]), tmp_path, first_step)
    first, second, third, new = (id for _, _, id, _ in package.began)
    assert first == second == third != new


@each
def test_a_tracker_that_cannot_begin_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(name, monkeypatch, fails=True)
    with pytest.raises(ConfigError) as caught:
        open_trackers(make_config(trackers=["tensorboard", name]), tmp_path, 1)
    line = str(caught.value)
    assert line.startswith(f"{name}: cannot begin a run: api_key not configured (no-tty). call login; expected ")
    assert line.endswith(f", or trackers without {name}")
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_the_user_s_to_mend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    told = rf"trackers: the package {name} is not installed; expected pip install {name}, or no {name} there"
    with pytest.raises(ConfigError, match=told):
        make_config(trackers=[name]).check_packages()


def test_a_folder_named_wandb_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves such folders wherever it ran, and Python would import them as empty packages."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="is not installed"):
        make_config(wandb=True).check_packages()


@pytest.mark.launched
@pytest.mark.parametrize(
    "door", [(sys.executable,), pytest.param(DEEPSPEED, marks=pytest.mark.slow)], ids=["own", "ds"]
)
def test_a_missing_package_is_named_before_the_start(
    door: tuple[str, ...], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "swanlab").mkdir()  # no package
    keys = {"model_path": str(make_checkpoint("llama")), "data_path": str(FAQ), "trackers": ["swanlab"]}
    done = run(
        *door, "train_ds.py", "--config", write_config(tmp_path / "run.yml", **keys), PYTHONPATH=f"{ROOT}:{tmp_path}"
    )
    assert done.returncode == 2, done.stderr
    assert error_lines(done)[0].startswith(
        "error: trackers: the package swanlab is not installed; expected pip install"
    )
    assert "starting" not in done.stdout and not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, ["tensorboard"]),
        ({"tensorboard": False}, []),
        ({"tensorboard": {"enabled": True}}, ["tensorboard"]),
        ({"wandb": True}, ["tensorboard", "wandb"]),
        ({"wandb": {"enabled": True}, "tensorboard": {"enabled": False}}, ["wandb"]),
        ({"trackers": ["mlflow", "swanlab"]}, ["mlflow", "swanlab"]),
        ({"trackers": ["mlflow"], "wandb": {"enabled": True, "project": "p"}}, ["mlflow", "wandb"]),
        ({"trackers": [], "wandb": {"project": "p"}}, []),
    ],
)
def test_sections_add_to_the_trackers_or_take_out_of_them(keys: dict[str, Any], named: list[str]) -> None:
    config = make_config(**keys)
    assert config.trackers == named
    assert [name for name in TRACKERS if getattr(config, name).enabled] == [name for name in TRACKERS if name in named]
    assert make_config().trackers == ["tensorboard"]
    again = TrainConfig.model_validate(config.dump())
    assert again == config and again.dump() == config.dump()


def test_a_tracker_that_is_named_and_taken_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wandb\.enabled: false, but trackers names wandb; expected only one of them"):
        make_config(trackers=["wandb"], wandb=False)


REAL = """
import math, sys
from pathlib import Path
from tests.training.metrics.test_tracking import FAKES, make_config
from training.metrics.tracking import open_trackers
folder, first = Path(sys.argv[1]), int(sys.argv[2])
config = make_config(trackers=list(FAKES), **{name: {"project": "llamas"} for name in FAKES})
config.check_packages()
for tracker in open_trackers(config, folder, first):
    for step in range(first, first + 3):
        tracker.log(step, {"loss": float(step), "eval_loss/instruct": math.nan})
    tracker.close(failed=False)
"""
ASKED = """
from mlflow import MlflowClient
client = MlflowClient()
(experiment,) = [each for each in client.search_experiments() if each.name == "llamas"]
(run,) = client.search_runs([experiment.experiment_id])
print(run.info.status, run.data.params["train_batch_size"])
print([(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")])
"""


@pytest.mark.longest
def test_the_real_trackers_take_what_they_get_and_go_on(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", "wandb", "swanlab", "mlflow")
    (tmp_path / "run").mkdir()
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}
    offline["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for first_step in (1, 4):
        done = run(python, "-c", REAL, tmp_path / "run", str(first_step), **offline)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("wandb", "swanlab"):
        files = list((tmp_path / "run").rglob(f"run-*.{name}"))
        assert len(files) == 2 and len({file.name for file in files}) == 1  # one id
        assert all(b"eval_loss/instruct" in file.read_bytes() for file in files)
    asked = run(python, "-c", ASKED, **offline)
    assert asked.stdout.splitlines()[-2:] == ["FINISHED 4", str([(step, float(step)) for step in range(1, 7)])]

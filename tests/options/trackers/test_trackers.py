"""Weights & Biases, SwanLab and MLflow, by stand-ins and as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from options import RunConfig
from options.trackers.services import SERVICES
from tests.conftest import FAQ, ROOT
from tests.environments import environment
from tests.launching import DEEPSPEED, error_lines, run, write_config
from training.config.section import leaves
from training.errors import ConfigError
from training.metrics.tracking import open_trackers


def make_config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 4} | sections
    )


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
NAMES = (*FAKES, "tensorboard")
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
        SERVICES[name](make_config(trackers=[name]), tmp_path, first_step)
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


@each
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
    assert [name for name in NAMES if getattr(config, name).enabled] == [name for name in NAMES if name in named]
    assert make_config().trackers == ["tensorboard"]
    again = RunConfig.model_validate(config.dump())
    assert again == config and again.dump() == config.dump()


def test_a_tracker_that_is_named_and_taken_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wandb\.enabled: false, but trackers names wandb; expected only one of them"):
        make_config(trackers=["wandb"], wandb=False)


REAL = """
import math, sys
from pathlib import Path
from tests.options.trackers.test_trackers import FAKES, make_config
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

"""Runs on Weights & Biases, SwanLab and MLflow, those that `trackers` names.

They receive the config and the numbers of each line of metrics.jsonl, and go on in a resumed run, which they find by
the id in `NAME_id`; Weights & Biases drops repeated steps itself. A package is imported only if it is named.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.terminal import reason_of
from common.whole_files import replace_text
from training.config.section import leaves
from training.errors import ConfigError
from training.metrics.tracking import Tracker

if TYPE_CHECKING:
    from options.trackers import TrackerKeys

    Begin = Callable[[TrackerKeys, Path, int], Tracker]  # a run, or go on with the one whose id lies in the folder

MOST_PARAMS = 100  # of a request to MLflow


class WandBTracker:
    """A run on Weights & Biases, with the key of `wandb login` or WANDB_API_KEY."""

    name = "wandb"

    def __init__(self, config: TrackerKeys, folder: Path, first_step: int) -> None:
        from wandb import init

        self._run: Any = init(dir=str(folder), **_about(self.name, config, folder, first_step))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class SwanLabTracker:
    """A run on SwanLab, with the key of `swanlab login` or SWANLAB_API_KEY."""

    name = "swanlab"

    def __init__(self, config: TrackerKeys, folder: Path, first_step: int) -> None:
        from swanlab import Settings, init

        settings = Settings(interactive=False)  # as it would ask for a key, while the other ranks wait
        about = _about(self.name, config, folder, first_step)
        self._run: Any = init(log_dir=str(folder / "swanlog"), settings=settings, **about)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(**{"state": "crashed", "error": "see the run's log"} if failed else {})


class MLflowTracker:
    """A run where MLFLOW_TRACKING_URI says; MLflow chooses its id."""

    name = "mlflow"

    def __init__(self, config: TrackerKeys, folder: Path, first_step: int) -> None:
        import mlflow

        self._mlflow, self._sent, file = mlflow, None, folder / f"{self.name}_id"
        mlflow.set_experiment(config.mlflow.project)
        if first_step > 1 and file.is_file():
            mlflow.start_run(run_id=file.read_text(encoding="ascii"))
            return
        replace_text(file, mlflow.start_run(run_name=config.mlflow.name).info.run_id)
        params = list(leaves(config.dump()))
        for begin in range(0, len(params), MOST_PARAMS):
            mlflow.log_params(dict(params[begin : begin + MOST_PARAMS]))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._sent = self._mlflow.log_metrics(dict(numbers), step=step, synchronous=False)

    def close(self, failed: bool) -> None:
        if self._sent:
            self._sent.wait()
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


SERVICES: dict[str, Begin] = {"wandb": WandBTracker, "swanlab": SwanLabTracker, "mlflow": MLflowTracker}
REMEDIES = {  # where one cannot begin
    "wandb": "wandb login, WANDB_MODE=offline",
    "swanlab": "swanlab login, SWANLAB_MODE=offline",
    "mlflow": "an MLFLOW_TRACKING_URI that can be reached",
}


def _about(name: str, config: TrackerKeys, folder: Path, first_step: int) -> dict[str, Any]:
    """Return what a tracker is told of the run: its config, and the id of its earlier starts or a new one."""
    section, file = getattr(config, name), folder / f"{name}_id"
    if first_step == 1 or not file.is_file():
        replace_text(file, uuid.uuid4().hex)
    about = {"project": section.project, "name": section.name, "config": config.dump()}
    return about | {"id": file.read_text(encoding="ascii"), "resume": "allow"}


def open_services(config: TrackerKeys, folder: Path, first_step: int) -> list[Tracker]:
    """Open those that the config names, on the rank that reports.

    Raises:
        ConfigError: one cannot be used.
    """
    trackers = []
    for name, begin in SERVICES.items():
        if name not in config.trackers:
            continue
        try:
            trackers.append(begin(config, folder, first_step))
        except Exception as error:  # packages raise many kinds: no key, no network, another's project
            problem = f"{name}: cannot begin a run: {reason_of(error)}"
            raise ConfigError(f"{problem}; expected {REMEDIES[name]}, or trackers without {name}") from None
    return trackers

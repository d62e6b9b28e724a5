"""Trackers: TensorBoard, Weights & Biases, SwanLab and MLflow, those that `trackers` names.

All receive the numbers of each line of metrics.jsonl, all but TensorBoard the config too, and all continue in a resumed
run. For TensorBoard a mark in the new event file hides earlier events of repeated steps. The others find their run by
the id in `NAME_id`; Weights & Biases drops repeated steps itself.

Cost: some 50 microseconds per number in TensorBoard's queue; its own thread writes to the disk, as those of the others
send. A package is imported only if it is named.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from common.terminal import reason_of
from common.whole_files import replace_text
from training.config.keys import TrainConfig
from training.config.section import leaves
from training.errors import ConfigError

TENSORBOARD_FOLDER = "tensorboard"
FLUSH_SECONDS = 10  # lag of TensorBoard's curves, and the most a kill can lose
MOST_PARAMS = 100  # of a request to MLflow


class Tracker(Protocol):
    """Draws curves; `name` appears in messages, and `TRACKERS` has the classes."""

    name: str

    def __init__(self, config: TrainConfig, folder: Path, first_step: int) -> None:
        """Begin a run, or go on with the one whose id or files lie in the run's folder."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step."""

    def close(self, failed: bool) -> None:
        """End the run; `failed` if by an error."""


class TensorBoardTracker:
    """Event files in the run's folder."""

    name = "tensorboard"

    def __init__(self, config: TrainConfig, folder: Path, first_step: int) -> None:
        from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread
        from torch.utils.tensorboard import SummaryWriter

        # On a full disk it ends with a traceback on the terminal; the writer raises the same, now or when it is used.
        hook = threading.excepthook
        threading.excepthook = lambda failure: None if isinstance(failure.thread, _AsyncWriterThread) else hook(failure)
        hidden_from = first_step if first_step > 1 else 0  # a new run may have evaluated before its first step
        self._writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=hidden_from, flush_secs=FLUSH_SECONDS)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandBTracker:
    """A run on Weights & Biases, with the key of `wandb login` or WANDB_API_KEY."""

    name = "wandb"

    def __init__(self, config: TrainConfig, folder: Path, first_step: int) -> None:
        from wandb import init

        self._run: Any = init(dir=str(folder), **_about(self.name, config, folder, first_step))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class SwanLabTracker:
    """A run on SwanLab, with the key of `swanlab login` or SWANLAB_API_KEY."""

    name = "swanlab"

    def __init__(self, config: TrainConfig, folder: Path, first_step: int) -> None:
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

    def __init__(self, config: TrainConfig, folder: Path, first_step: int) -> None:
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


# TensorBoard's files last: the others may refuse to begin.
TRACKERS: dict[str, type[Tracker]] = {
    each.name: each for each in (WandBTracker, SwanLabTracker, MLflowTracker, TensorBoardTracker)
}
REMEDIES = {  # where one cannot begin
    "wandb": "wandb login, WANDB_MODE=offline",
    "swanlab": "swanlab login, SWANLAB_MODE=offline",
    "mlflow": "an MLFLOW_TRACKING_URI that can be reached",
}


def _about(name: str, config: TrainConfig, folder: Path, first_step: int) -> dict[str, Any]:
    """Return what a tracker is told of the run: its config, and the id of its earlier starts or a new one."""
    section, file = getattr(config, name), folder / f"{name}_id"
    if first_step == 1 or not file.is_file():
        replace_text(file, uuid.uuid4().hex)
    about = {"project": section.project, "name": section.name, "config": config.dump()}
    return about | {"id": file.read_text(encoding="ascii"), "resume": "allow"}


def open_trackers(config: TrainConfig, folder: Path, first_step: int) -> list[Tracker]:
    """Open the trackers that the config names, on the rank that reports.

    Raises:
        ConfigError: a tracker cannot be used.
    """
    trackers = []
    for name, kind in TRACKERS.items():
        try:
            trackers += [kind(config, folder, first_step)] if name in config.trackers else []
        except Exception as error:  # packages raise many kinds: no key, no network, another's project
            if name not in REMEDIES:
                raise
            problem = f"{name}: cannot begin a run: {reason_of(error)}"
            raise ConfigError(f"{problem}; expected {REMEDIES[name]}, or trackers without {name}") from None
    return trackers

"""Trackers: TensorBoard and Weights & Biases.

Both receive the numbers of each line of metrics.jsonl, and both continue in a resumed run. For TensorBoard a mark in
the new event file hides earlier events of repeated steps. Weights & Biases finds its run by the id in `wandb_id`, and
drops repeated steps itself.

Cost: some 50 microseconds per number in TensorBoard's queue; its own thread writes to the disk. A package is imported
only if its section is enabled.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from common.whole_files import replace_text
from training.config.keys import TrainConfig
from training.errors import ConfigError

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_id"
FLUSH_SECONDS = 10  # lag of TensorBoard's curves, and the most a kill can lose


class Tracker(Protocol):
    """Draws curves; `name` is for messages."""

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step."""

    def close(self, failed: bool) -> None:
        """End the run; `failed` if by an error."""


class TensorBoardWriter:
    """Event files in the run's folder."""

    name = "tensorboard"

    def __init__(self, folder: Path, first_step: int) -> None:
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


class WandBWriter:
    """A run on Weights & Biases, with the key of `wandb login` or WANDB_API_KEY.

    Raises:
        ConfigError: the package is missing, or it cannot begin a run.
    """

    name = "wandb"

    def __init__(self, folder: Path, first_step: int, config: TrainConfig) -> None:
        try:
            from wandb import init
        except ImportError:
            raise ConfigError(
                "wandb.enabled: the package wandb is not installed; expected pip install wandb, or enabled: false"
            ) from None
        id_file = folder / WANDB_ID_FILE
        if first_step == 1 or not id_file.is_file():
            replace_text(id_file, uuid.uuid4().hex)
        try:
            self._run: Any = init(
                project=config.wandb.project,
                name=config.wandb.name,
                dir=str(folder),
                config=config.dump(),
                id=id_file.read_text(encoding="ascii"),
                resume="allow",
            )
        except Exception as error:  # wandb raises many kinds: no key, no network, a project that is not the user's
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"wandb: cannot begin a run: {reason}; expected wandb login, WANDB_MODE=offline, or enabled: false"
            ) from None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def open_trackers(config: TrainConfig, folder: Path, first_step: int) -> list[Tracker]:
    """Open the trackers that the config enables, on the rank that reports.

    Raises:
        ConfigError: a tracker cannot be used.
    """
    trackers: list[Tracker] = []
    if config.wandb.enabled:
        trackers.append(WandBWriter(folder, first_step, config))
    if config.tensorboard.enabled:
        trackers.append(TensorBoardWriter(folder, first_step))
    return trackers

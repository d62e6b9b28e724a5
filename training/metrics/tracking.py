"""Trackers, which draw the numbers of metrics.jsonl: TensorBoard here, others in options.

A mark in the new event file of a resumed run hides earlier events of repeated steps. Cost: some 50 microseconds per
number in TensorBoard's queue; its own thread writes to the disk. Its package is imported only if it is named.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from training.config.keys import TrainConfig
from training.option import options_of

TENSORBOARD_FOLDER = "tensorboard"
FLUSH_SECONDS = 10  # lag of TensorBoard's curves, and the most a kill can lose


class Tracker(Protocol):
    """Draws curves; `name` appears in messages."""

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step."""

    def close(self, failed: bool) -> None:
        """End the run; `failed` if by an error."""


class TensorBoardTracker:
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


def open_trackers(config: TrainConfig, folder: Path, first_step: int) -> list[Tracker]:
    """Open the trackers that the config names, on the rank that reports.

    Raises:
        ConfigError: a tracker cannot be used.
    """
    trackers: list[Tracker] = []
    for option in options_of(config):
        trackers += option.open_trackers(config, folder, first_step)

    # Last, as the others may refuse to begin.
    if TensorBoardTracker.name in config.trackers:
        trackers.append(TensorBoardTracker(folder, first_step))
    return trackers

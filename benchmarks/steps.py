"""Make rows of random words, and train on them in timed steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from data.loader import Loader
from data.sample_set import InMemory
from training.config.keys import TrainConfig
from training.distributed import processes
from training.engine.trainer import Trainer


class Pace(Protocol):
    """Starts the steps of a worker and takes their times."""

    def wait(self) -> bool:
        """Wait until the next step shall begin; False where none shall."""

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        """Take a step's seconds and its tokens that are not padding."""


class Straight:
    """The steps one after the other.

    Attributes:
        speeds: tokens per second of the steps so far.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.speeds: list[float] = []

    def wait(self) -> bool:
        return len(self.speeds) < self._left

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        self.speeds.append(tokens / seconds)


def run_config(folder: Path, stages: int, rows: int, length: int, **keys: Any) -> TrainConfig:
    """Make the config of a pipeline that trains on `rows` rows a step.

    Args:
        keys: more of a config's keys; `parts` is that of `model_topo`.
    """
    topology = {"process_topology": {"dims": [stages, 1]}, "parts": keys.pop("parts", None)}
    return TrainConfig.model_validate(
        {
            "model_path": str(folder),
            "data_path": "",
            "save_path": str(folder),
            "from_scratch": True,
            "max_seq_len": length,
            "train_batch_size": rows,
            "model_topo": topology,
        }
        | keys
    )


def random_rows(words: int, rows: int, length: int) -> InMemory:
    """Make full rows of random words, the same on every rank."""
    torch.manual_seed(0)
    ids = torch.randint(0, words, (rows, length)).tolist()
    return InMemory([{"input_ids": row, "labels": row} for row in ids])


def rows_loader(config: TrainConfig, words: int) -> Loader:
    """Make steps of the same full rows, one a micro-batch."""
    rows = config.train_batch_size
    return Loader(random_rows(words, rows, config.max_seq_len), rows, 1, config.model_topo.row_replicas, seed=0)


@contextmanager
def joined(config: TrainConfig) -> Iterator[processes.ProcessInfo]:
    """Join the other processes of the run."""
    process = processes.ProcessInfo.from_environment()
    assert process is not None
    processes.start(process, config.model_topo)
    yield process
    processes.stop()


def train(trainer: Trainer, loader: Loader, pace: Pace, figures: Callable[[], dict[str, Any]] = dict) -> None:
    """Make steps at a pace.

    Args:
        figures: more figures of the last step.
    """
    for step in count():
        if not pace.wait():
            return
        batch = loader.batch(step)
        begin = now()
        loss = trainer.train_step(loader, batch)
        pace.done(now() - begin, batch.tokens, loss=loss, **figures())


def now() -> float:
    """Return the time at which the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()

"""The steps of a worker, taken at a pace and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from benchmarks.turns import Pace
from data.loader import Loader
from training.config.keys import TrainConfig
from training.distributed import processes
from training.engine.trainer import Trainer


@contextmanager
def joined(config: TrainConfig) -> Iterator[processes.Place]:
    """This process among the others of the run."""
    place = processes.Place.from_environment()
    assert place is not None
    processes.start(place, config.model_topo)
    yield place
    processes.stop()


def train(trainer: Trainer, loader: Loader, pace: Pace, figures: Callable[[], dict[str, Any]] = dict) -> None:
    """Make steps at a pace.

    Args:
        figures: what is to be told of a step besides its time.
    """
    for step in count():
        if not pace.wait():
            return
        batch = loader.batch(step)
        begin = now()
        loss = trainer.train_step(loader, batch)
        pace.done(now() - begin, batch.tokens, loss=loss, **figures())


def now() -> float:
    """The time at which all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()

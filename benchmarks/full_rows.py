"""Training from random weights on full rows of chance, all tokens supervised: what most workers measure.

Every step takes the same rows, so that steps can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.turns import Pace
from data.loader import Loader
from data.sample_set import InMemory
from training import distributed
from training.config import TrainConfig
from training.trainer import Trainer


def run_config(folder: Path, stages: int, rows: int, length: int, **keys: Any) -> TrainConfig:
    """The config of a pipeline that trains the model of `folder` on `rows` rows a step.

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


@contextmanager
def joined(config: TrainConfig) -> Iterator[distributed.Place]:
    """This process among the others of the run."""
    place = distributed.Place.from_environment()
    assert place is not None
    distributed.start(place, config.model_topo)
    yield place
    distributed.stop()


def random_rows(words: int, rows: int, length: int) -> InMemory:
    """Rows of words of chance, the same on every rank."""
    torch.manual_seed(0)
    ids = torch.randint(0, words, (rows, length)).tolist()
    return InMemory([{"input_ids": row, "labels": row} for row in ids])


def rows_loader(config: TrainConfig, words: int) -> Loader:
    """Steps of full rows, one a micro-batch."""
    rows = config.train_batch_size
    return Loader(random_rows(words, rows, config.max_seq_len), rows, 1, 1, seed=0)


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
        trainer.train_step(loader, batch)
        pace.done(now() - begin, batch.tokens, **figures())


def now() -> float:
    """The time at which all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()

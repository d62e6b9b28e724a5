"""Full rows of chance, all tokens supervised, and the config to train on them from random weights.

Every step takes the same rows, so that steps can be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data.loader import Loader
from data.sample_set import InMemory
from training.config.keys import TrainConfig


def run_config(folder: Path, stages: int, rows: int, length: int, **keys: Any) -> TrainConfig:
    """The config of a pipeline that trains the model of `folder` on `rows` rows a step.

    Args:
        keys: more of a config's keys; `parts` is that of `model_topo`, `replicas` the number in its dims.
    """
    topology = {"process_topology": {"dims": [stages, keys.pop("replicas", 1)]}, "parts": keys.pop("parts", None)}
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
    """Rows of words of chance, the same on every rank."""
    torch.manual_seed(0)
    ids = torch.randint(0, words, (rows, length)).tolist()
    return InMemory([{"input_ids": row, "labels": row} for row in ids])


def rows_loader(config: TrainConfig, words: int) -> Loader:
    """Steps of full rows, one a micro-batch."""
    rows = config.train_batch_size
    return Loader(random_rows(words, rows, config.max_seq_len), rows, 1, config.model_topo.row_replicas, seed=0)

"""The same job on the user's own model and records: its config, and what tells one job from another.

The config is a start, not an optimum: as many stages as there are GPUs (two on a CPU), `parts: auto`, and a learning
rate that falls with the size of the model. It lies beside the results, to be edited and trained again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml

from common.whole_files import replace_text
from data.records.sources import files_of
from data.settings import Source
from models.api import read_spec
from models.checkpoint.layout import resolve
from models.spec import ModelSpec

MOST_STAGES = 8
LONGEST = 1024  # tokens of a sample
BATCH = 16
RECORDED = [2, 3]  # steps of the timeline: the first one is slower
# Two rates that are known to work, and a straight line between them in logarithms: 5e-4 for 135 million weights, as the
# shipped run has it, and 2e-5 for 7 billion.
KNOWN_LR, KNOWN_SIZE, FALL = 5e-4, 135e6, 0.815
HEAD = "# Made by `make quickstart` for {model}; edit it and train again: python train_ds.py --config {path}\n"


def processes() -> int:
    """Choose the number of stages for this machine."""
    gpus = torch.cuda.device_count()
    return min(gpus, MOST_STAGES) if gpus else min(2, len(os.sched_getaffinity(0)))


def write_config(path: Path, model: str, pipeline: Path, data: str, run: Path) -> None:
    """Write the run's YAML file.

    Args:
        model: the user's folder.
        pipeline: where it lies in the pipeline layout.
        run: the run's save_path.

    Raises:
        CheckpointError: `model` is no folder of a model that Pipetune knows.
        DataError: `data` leads to nothing.
    """
    spec = read_spec(resolve(model))
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    files_of(Source(path=data))
    keys: dict[str, Any] = {
        "model_path": str(pipeline),
        "data_path": data,
        "save_path": str(run),
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": BATCH,
        "n_epoches": 3,
        "max_seq_len": min(LONGEST, spec.context or LONGEST),
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate(spec), "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4, "cos_min_ratio": 0.05}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": int(bf16)},  # in fp32 with one replica stage 1 takes a copy more, for nothing
        "model_topo": {"process_topology": {"dims": [min(processes(), spec.n_layers), 1]}, "parts": "auto"},
        "profile_steps": RECORDED,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, HEAD.format(model=model, path=path) + yaml.safe_dump(keys, sort_keys=False))


def learning_rate(spec: ModelSpec) -> float:
    """Choose a learning rate, of two digits, for fine-tuning all weights with AdamW."""
    shapes = chain.from_iterable(spec.shapes(layer).values() for layer in range(spec.n_layers))
    size = sum(map(prod, shapes))
    return float(f"{KNOWN_LR * (size / KNOWN_SIZE) ** -FALL:.1e}") if size > KNOWN_SIZE else KNOWN_LR


def fingerprint(model: str, data: str, overrides: Sequence[str]) -> str:
    """List what the results depend on: names, sizes and times of the model's files and the records, and the keys."""
    files = [*sorted(path for path in resolve(model).iterdir() if path.is_file()), *files_of(Source(path=data))]
    digest = hashlib.sha256()
    for path in files:
        about = path.stat()
        digest.update(f"{path.resolve()}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    digest.update("\0".join(overrides).encode())
    return digest.hexdigest()

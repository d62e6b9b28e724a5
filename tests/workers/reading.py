"""Starts engines, and notes what each process read of the weights and what it holds then, case by case.

Its cases are {"name", "config": {...}, "kind": "zero" | "pipeline"}; writes <folder>/<name>.<rank>.json with the bytes
"read" of the checkpoint's tensors, by name, and the digests of those "held".
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from torch import Tensor

from models.api import read_spec
from models.checkpoint.tensor_files import MappedFile, SafetensorsFile
from tests.workers.zero import KINDS, build
from training.config.keys import TrainConfig


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    read_spec(Path(config.model_path))  # which may first write and read a small model, to prove the family
    read: Counter[str] = Counter()

    def noted(reads: Callable[[Any, str], Tensor]) -> Callable[[Any, str], Tensor]:
        def noting(file: Any, name: str) -> Tensor:
            tensor = reads(file, name)
            read[name] += tensor.nbytes
            return tensor

        return noting

    with (
        patch.object(SafetensorsFile, "read", noted(SafetensorsFile.read)),
        patch.object(MappedFile, "read", noted(MappedFile.read)),
    ):
        trainer = build(KINDS[case["kind"]], config)
    module, sharded = trainer.engine.module, trainer.engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=sharded):
        held = {name: digest(tensor) for name, tensor in module.state_dict().items()}
    outcome = {"read": read, "held": held}
    (folder / f"{case['name']}.{torch.distributed.get_rank()}.json").write_text(json.dumps(outcome))
    trainer.engine.destroy()


def digest(tensor: Tensor) -> str:
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"

"""Specs, configs and bases of plans, from config.json alone, as a planner's user has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.api import read_spec
from models.spec import ModelSpec
from options import RunConfig
from options.planner.inputs import Basis, Workload
from training.config.keys import TrainConfig
from training.metrics.devices import parse_devices

SIZES = {  # hidden size, width of the MLP, blocks, heads
    "llama-7b": (4096, 11008, 32, 32),
    "llama-13b": (5120, 13824, 40, 40),
    "llama-30b": (6656, 17920, 60, 52),
    "llama-65b": (8192, 22016, 80, 64),
}


def llama(folder: Path, name: str = "llama-7b", **changes: Any) -> ModelSpec:
    """A spec from config.json alone, as a planner's user has it."""
    hidden, inner, blocks, heads = SIZES[name]
    fields = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    return spec_of(folder, fields | changes)


def spec_of(folder: Path, fields: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return read_spec(folder)


def config_of(folder: Path, stages: int, replicas: int = 1, **keys: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "model_path": str(folder),
        "data_path": str(folder / "records.json"),
        "save_path": str(folder / "run"),
        "train_batch_size": 256,
        "max_seq_len": 2048,
        "fp16": {"enabled": True},
        "use_grad_ckpt": True,
        "model_topo": {"process_topology": {"dims": [stages, replicas]}},
    }
    return RunConfig.model_validate(defaults | keys)


def basis_of(spec: ModelSpec, config: TrainConfig, devices: str = "V100-32G") -> Basis:
    return Basis(config, spec, Workload.assumed(config), parse_devices(devices)[1])

"""Adapters of tiny models, as peft saves them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.adapters import is_factor
from models.checkpoint.adapter import PEFT_WEIGHTS, AdaptedStates, peft_config, peft_name, to_peft, trained_names
from models.checkpoint.layout import ADAPTER
from models.checkpoint.source import open_source
from models.spec import ModelSpec


def save_adapter(spec: ModelSpec, model: Path, seed: int = 0) -> Path:
    """Save an adapter of random numbers; what is trained in full has the base's, and a little noise."""
    generator, saved = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    start = AdaptedStates(open_source(model, spec.base), spec, None)
    for layer in range(spec.n_layers):
        state = start.read_layer(layer)
        for name in trained_names(spec, layer):
            noise = torch.randn(state[name].shape, generator=generator)
            value = 0.1 * noise if is_factor(name) else state[name] + 0.01 * noise
            saved[peft_name(spec, layer, name)] = to_peft(name, value).contiguous()
    folder = Path(tempfile.mkdtemp(dir=model.parent, prefix="adapter-"))
    save_file(saved, folder / PEFT_WEIGHTS)
    (folder / ADAPTER).write_text(json.dumps(peft_config(spec, str(model))))
    return folder

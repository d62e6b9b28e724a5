"""Adapters of tiny models, as peft saves them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.adapters import Lora, Trained, is_factor
from models.checkpoint.adapter import AdaptedStates, PeftFolder
from models.checkpoint.adapter_settings import peft_config
from models.checkpoint.digest import DIGEST
from models.checkpoint.layout import ADAPTER, layer_file
from models.checkpoint.peft_names import PEFT_WEIGHTS, peft_name, to_peft
from models.checkpoint.source import open_source
from models.conversion.to_pipeline import hg_to_pp
from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from models.spec import ModelSpec


class RandomFactors:
    """Factors of random numbers, the same in every process."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def read(self, layer: int, names: list[str]) -> dict[str, Tensor]:
        generator, shapes = torch.Generator().manual_seed(layer), self._spec.shapes(layer)
        return {name: 0.1 * torch.randn(shapes[name], generator=generator) for name in names}


def adapted_source(spec: ModelSpec, model: Path) -> tuple[ModelSpec, AdaptedStates]:
    """A model with adapters of random numbers on all linear layers."""
    spec = spec.training(Trained(Lora(r=2, alpha=6)))
    return spec, AdaptedStates(open_source(model, spec.base), spec, RandomFactors(spec))


def save_adapter(spec: ModelSpec, model: Path, seed: int = 0) -> Path:
    """Save an adapter of random numbers; what is trained in full has the base's, and a little noise."""
    generator, saved = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    start = AdaptedStates(open_source(model, spec.base), spec, None)
    for layer in range(spec.n_layers):
        state = start.read_layer(layer)
        for name in spec.trained_names(layer):
            noise = torch.randn(state[name].shape, generator=generator)
            value = 0.1 * noise if is_factor(name) else state[name] + 0.01 * noise
            if spec.tied and name == HEAD_WEIGHT:
                value = saved[peft_name(spec, 0, EMBEDDING_WEIGHT)]
            saved[peft_name(spec, layer, name)] = to_peft(name, value).clone().contiguous()
    folder = Path(tempfile.mkdtemp(dir=model.parent, prefix="adapter-"))
    save_file(saved, folder / PEFT_WEIGHTS)
    (folder / ADAPTER).write_text(json.dumps(peft_config(spec, str(model))))
    return folder


def save_run(spec: ModelSpec, model: Path, base: Path | None = None) -> Path:
    """Save an adapter of random numbers as the checkpoint of a run, whose base may be in another layout."""
    saved = save_adapter(spec, model)
    run = saved.with_name(f"run-{saved.name}")
    hg_to_pp(model, run)
    factors = PeftFolder(saved, spec)
    for layer in range(spec.n_layers):
        state = factors.read(layer, spec.trained_names(layer))
        torch.save({name: tensor.clone() for name, tensor in state.items()}, run / layer_file(layer))
    (run / ADAPTER).write_text(json.dumps(peft_config(spec, str(base or model)) | {DIGEST: ""}))
    return run

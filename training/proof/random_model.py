"""Random weights for a small model, in the pipeline layout: no part is constant, so no gradient is zero or flat."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.layout import layer_file
from models.checkpoint.tensor_files import save_state_dict
from models.spec import ModelSpec


def write_model(folder: Path, spec: ModelSpec, seed: int) -> None:
    """Write the layer files of a model, in fp32."""
    for layer in range(spec.n_layers):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + layer)
            state = {name: _random(tensor) for name, tensor in spec.build(layer).state_dict().items()}
        if spec.tied and layer == 0:
            embedding = state[spec.family.tie.embedding]
        if spec.tied and layer == spec.n_layers - 1:
            state[spec.family.tie.head] = embedding
        save_state_dict(state, folder / layer_file(layer))


def _random(tensor: Tensor) -> Tensor:
    """Matrices whose products keep their size, about; norms and biases around where they start."""
    if tensor.dim() > 1:
        return torch.randn_like(tensor) / tensor.shape[-1] ** 0.5
    return tensor + 0.1 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor

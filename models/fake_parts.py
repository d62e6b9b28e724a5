"""What one of the processes that share a layer has of it: shapes, and the layer itself on fake tensors.

Which dimension of a weight is divided is what transformers' own plan of a model says (`base_model_tp_plan`): columns of
the first products of attention and MLP, rows of the last ones. Experts are divided alike, each of them; embedding and
head by the vocabulary; norms and routers are whole everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.spec import ModelSpec, key_heads

GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"  # where what lies between the two is whole


def obstacle(spec: ModelSpec, sharers: int) -> str | None:
    """Why so many processes cannot share the layers of a model, if they cannot."""
    if not getattr(spec.config, "base_model_tp_plan", None):
        return f"transformers says of {spec.family.name} nothing about how its layers are divided"
    for what, count in (("heads", int(spec.config.num_attention_heads)), ("key heads", key_heads(spec.config))):
        if count % sharers:
            return f"{sharers} processes do not divide the model's {count} {what}"
    return None


def part_shapes(spec: ModelSpec, layer: int, sharers: int) -> dict[str, torch.Size]:
    """`ModelSpec.shapes` of the largest part that one of so many processes has."""
    shapes = spec.shapes(layer)
    return {name: _part(shape, _divided(spec, name, len(shape)), sharers) for name, shape in shapes.items()}


def make_part(spec: ModelSpec, module: nn.Module, sharers: int) -> None:
    """Leave of a layer on fake tensors what one of so many processes has."""
    for name, weight in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        shape = _part(weight.shape, _divided(spec, name, weight.dim()), sharers)
        if shape != weight.shape:
            setattr(module.get_submodule(path), leaf, nn.Parameter(weight.new_empty(shape)))
    for path, owner in module.named_modules():
        if (style := _style(spec, path)) == GATHERED:
            owner.register_forward_hook(lambda _, inputs, output: torch.cat([output] * sharers, dim=-1))
        elif style == SPLIT:
            owner.register_forward_pre_hook(lambda _, inputs: _first(inputs[0], sharers))


def _style(spec: ModelSpec, path: str) -> str:
    """What the plan says of a module, or of a weight that is none of a module's own."""
    plan: dict[str, Any] = getattr(spec.config, "base_model_tp_plan", None) or {}
    return str(plan.get(f"layers.*.{path.removeprefix('block.')}", ""))


def _divided(spec: ModelSpec, name: str, dimensions: int) -> int | None:
    """The dimension of a weight that is divided, if one is."""
    if name in (spec.family.tie.embedding, spec.family.tie.head, "lm_head.bias"):
        return 0
    style = _style(spec, name.rpartition(".")[0]) or _style(spec, name)
    if "colwise" in style:
        return max(0, dimensions - 2)
    return dimensions - 1 if "rowwise" in style and dimensions > 1 else None


def _part(shape: torch.Size, divided: int | None, sharers: int) -> torch.Size:
    return torch.Size(-(-size // sharers) if number == divided else size for number, size in enumerate(shape))


def _first(hidden: Tensor, sharers: int) -> Tensor:
    return hidden[..., : hidden.shape[-1] // sharers].contiguous()

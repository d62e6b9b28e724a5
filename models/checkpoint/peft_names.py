"""Names and shapes that trained weights have in peft: those of transformers' model, of text alone or the whole one.

An adapter of a model of images and text is one of transformers' whole model, where the decoder's names begin otherwise,
and the tower has names. Which of its modules are adapted is read from the names of the weights: targets are words that
mean one thing there and another here, as a tower may have modules of the decoder's last names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from models.adapters import Lora, Trained, is_factor
from models.family import EYES
from models.sees import Beginnings
from models.spec import ModelSpec

PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


class WholeNames(Beginnings):
    """Names in transformers' whole model of images and text, by how they begin there."""

    decoder: str
    base: str

    def of(self, spec: ModelSpec, path: str) -> str:
        """Name a part of the decoder as in the whole model."""
        begin = spec.family.prefix
        return self.decoder + path.removeprefix(begin) if path.startswith(begin) else path

    def named(self, spec: ModelSpec, layer: int, name: str) -> str:
        """Name a trained weight as peft does in the whole model."""
        if name.startswith(f"{EYES}."):
            path = self.base + name.removeprefix(f"{EYES}.") + (".weight" if is_factor(name) else "")
        else:
            path = self.of(spec, peft_name(spec, layer, name).removeprefix(PEFT_PREFIX))
        return PEFT_PREFIX + path

    def are_in(self, names: Collection[str]) -> bool:
        """Return whether an adapter's weights have such names."""
        return any(name.startswith(PEFT_PREFIX + self.decoder) for name in names)

    def lora(self, spec: ModelSpec, said: Lora, weights: Collection[str], names: Collection[str]) -> Lora:
        """Say in names of a model with eyes what peft's settings say in those of the whole model.

        Args:
            said: the settings.
            weights: those of its targets that are weights of experts.
            names: of the adapter's weights.
        """
        every = spec.training(Trained(Lora(r=1, beside=(f"{EYES}.",))))
        adapted = [each for each in _linear_factors(every) if self.named(every, *each) in names]
        owners = [(layer, name.rpartition(".")[0]) for layer, name in adapted]
        paths = [spec.path(*each) for each in owners]
        lora = replace(
            said,
            modules_to_save=tuple(self._own(spec, each) for each in said.modules_to_save),
            beside=tuple(f"{owner}." for _, owner in owners if owner.startswith(f"{EYES}.")),
        )

        # In few words, where these mean the same; else each module by its name.
        experts = [self._own(spec, each) for each in weights]
        short = replace(lora, targets=(*sorted({path.rpartition(".")[2] for path in paths}), *experts))
        same = list(_linear_factors(spec.training(Trained(short)))) == adapted
        return short if same else replace(lora, targets=(*paths, *experts))

    def _own(self, spec: ModelSpec, path: str) -> str:
        """Name a part of the whole model as its targets do here."""
        if path.startswith(self.decoder):
            return spec.family.prefix + path.removeprefix(self.decoder)
        return spec.path(0, f"{EYES}.{path.removeprefix(self.base)}") if path.startswith(self.base) else path


def _linear_factors(spec: ModelSpec) -> Iterator[tuple[int, str]]:
    """Yield the layer and the name of each linear layer's first factor."""
    for layer in range(spec.n_layers):
        yield from ((layer, name) for name in spec.shapes(layer) if name.endswith(".lora_A"))


def peft_name(spec: ModelSpec, layer: int, name: str) -> str:
    """Name a trained weight as peft does."""
    owner, _, leaf = name.rpartition(".")
    if not is_factor(name):
        paths = spec.paths(layer, name)
        return f"{PEFT_PREFIX}{paths[0] if layer == 0 else paths[-1]}"  # each end of a tied model by its own name
    factor = leaf[-6:]  # of `gate_up_proj_lora_A`, or all of a linear layer's `lora_A`
    if leaf == factor:
        return f"{PEFT_PREFIX}{spec.path(layer, owner)}.{factor}.weight"
    # peft wraps the module once for each weight, in their order; the last one is the outermost.
    same = [each for each in spec.shapes(layer) if each.startswith(f"{owner}.") and each.endswith(factor)]
    inside = len(same) - 1 - same.index(name)
    return f"{PEFT_PREFIX}{spec.path(layer, owner)}{'.base_layer' * inside}.{factor}.weight"


def to_peft(name: str, tensor: Tensor) -> Tensor:
    """Give a trained weight the shape that it has in peft, which joins the factors of all experts."""
    if not (is_factor(name) and tensor.dim() == 3):
        return tensor
    joined = tensor.flatten(0, 1) if name.endswith("A") else tensor.permute(1, 2, 0).flatten(1)
    return joined.contiguous()


def from_peft(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """Give a tensor of peft's the shape that the weight has here; as it is, where it cannot have it."""
    if not (is_factor(name) and len(shape) == 3) or tensor.numel() != shape.numel():
        return tensor
    experts, rows, columns = shape
    return (
        tensor.view(shape) if name.endswith("A") else tensor.view(rows, columns, experts).permute(2, 0, 1).contiguous()
    )

"""What a `Pipeline` is made of: layers, or functions that make them, and how they are divided among the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from training.errors import ConfigError
from training.plan.partition import best_split

Layer = nn.Module | Callable[[], nn.Module]
ForwardStep = Callable[[nn.Module, Any], Any]
Loss = Callable[[Any, Any], Tensor]


def make(layer: Layer, seed: int) -> nn.Module:
    """The layer itself; one that a function makes has the same random weights in whichever process that happens."""
    if isinstance(layer, nn.Module):
        return layer
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too, for good
        return layer()


def check_functions(**functions: Callable[..., Any]) -> None:
    """Raise a ConfigError where one is a module with weights of its own."""
    for name, function in functions.items():
        if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
            raise ConfigError(f"{name}: has weights, which no layer's file would hold; expected them in the layers")


def on_meta(layers: Sequence[Layer]) -> list[nn.Module]:
    """The layers; those that are yet to be made take no memory."""
    with torch.device("meta"):
        return [make(layer, 0) for layer in layers]


def count_weights(layers: Sequence[Layer]) -> list[int]:
    """The parameters of each layer."""
    return [sum(weight.numel() for weight in layer.parameters()) for layer in on_meta(layers)]


def divide(layers: Sequence[Layer], parts: Sequence[int] | None, stages: int) -> list[int]:
    """Layers per stage.

    Args:
        parts: what the user asks for; where absent, the largest stage has as few parameters as can be.

    Raises:
        ConfigError: the layers cannot be divided so.
    """
    if len(layers) < stages:
        raise ConfigError(f"parts: {stages} stages for {len(layers)} layers; expected a layer for each stage")
    if parts is None:
        parts = best_split([count + 1 for count in count_weights(layers)], stages, lambda *_: True)
        assert parts is not None  # any division is one
    if sum(parts) != len(layers):
        raise ConfigError(f"parts: {list(parts)} sums to {sum(parts)}, but there are {len(layers)} layers")
    holders: dict[int, int] = {}
    stage_of = [stage for stage, size in enumerate(parts) for _ in range(size)]
    made = on_meta(layers)  # all of them stay, so that no id is given twice
    for number, layer in enumerate(made):
        for name, weight in layer.named_parameters():
            other = holders.setdefault(id(weight), number)
            if stage_of[other] != stage_of[number]:
                raise ConfigError(
                    f"parts: layers {other} and {number} share {name}, and {list(parts)} puts them on two stages; "
                    "expected one"
                )
    return list(parts)

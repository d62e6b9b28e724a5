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


def count_weights(layers: Sequence[Layer]) -> list[int]:
    """The parameters of each layer; none that is yet to be made takes memory."""
    with torch.device("meta"):
        return [sum(weight.numel() for weight in make(layer, 0).parameters()) for layer in layers]


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
    for number, layer in enumerate(layers):
        for name, weight in layer.named_parameters() if isinstance(layer, nn.Module) else ():
            other = holders.setdefault(id(weight), number)
            if stage_of[other] != stage_of[number]:
                raise ConfigError(
                    f"parts: layers {other} and {number} share {name}, and {list(parts)} puts them on two stages; "
                    "expected one"
                )
    return list(parts)

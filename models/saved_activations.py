"""What autograd keeps of a layer between its forward and its backward pass.

A layer runs once on fake tensors (`models.fake_layers`), and each tensor that autograd saves is counted by its storage:
residuals in fp32 included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from models.fake_layers import fake_layer
from models.spec import ModelSpec
from models.weight_gradients import linear_layers


@dataclass(frozen=True)
class Saved:
    """Bytes for one micro-batch.

    Attributes:
        inside: saved by the layer, its input included where it is saved.
        arguments: masks and angles, which the blocks of a stage share.
        largest: of the tensors.
        waiting: what the gradients of weights are made of, where they wait: the linear layers' inputs and the gradients
            of their outputs; of an embedding and a head nothing, as theirs do not wait.
    """

    inside: int
    arguments: int
    largest: int
    waiting: int


def saved_by(spec: ModelSpec, layer: int, rows: int, length: int, dtype: torch.dtype, flash: bool = False) -> Saved:
    """What a layer keeps for a micro-batch [rows, length]; see `fake_layer`."""
    kept: list[Tensor] = []
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def note(linear: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        inputs.append(arguments[0])
        outputs.append(output)

    with fake_layer(spec, layer, rows, length, dtype, flash) as fake:
        for linear in linear_layers(fake.module):
            linear.register_forward_hook(note)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            fake.run()
        given = _storages(tree_leaves(fake.arguments))
        there = given | _storages(fake.module.state_dict(keep_vars=True).values())
        inside = [size for storage, size in _storages(kept).items() if storage not in there]
    return Saved(
        inside=sum(inside),
        arguments=sum(given.values()),
        largest=max(inside, default=0),
        waiting=sum(_storages(inputs).values()) + sum(output.nbytes for output in outputs),
    )


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """Bytes of what lies under the tensors among some values, each storage once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}

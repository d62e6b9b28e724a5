"""What autograd keeps of a layer between its forward and its backward pass.

Nothing is derived by hand. A layer runs once on fake tensors, which have shapes and no numbers, and each tensor that
autograd saves is counted by its storage. So every family is right by construction, residuals in fp32 included. Masks
and angles are made for a short row and enlarged to the length asked for. Experts stand for each other: each token is
sent to the first ones. Costs 0.1 s a kind of layer and no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import local_torch_dtype

from models.attention import TORCH
from models.layers import Block
from models.spec import ModelSpec
from models.weight_gradients import linear_layers

SHORT = 23  # the length of the row that masks and angles are made for: no other dimension of a model is a prime like it
EXPERTS = "planned"  # what transformers knows `_any_experts` by


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
    """What a layer keeps for a micro-batch [rows, length].

    Args:
        flash: attention without scores in memory, whatever the family's usual kernel does.
    """
    spec = _apart(spec, flash)
    positions = spec.positions()
    short = torch.zeros(rows, SHORT, spec.config.hidden_size)
    kinds = positions.arguments(short, torch.arange(SHORT).repeat(rows, 1), None)
    with FakeTensorMode(), local_torch_dtype(dtype):
        module = spec.build(layer, positions)
        hidden = torch.empty(rows, length, spec.config.hidden_size, requires_grad=True)
        ids = torch.empty(rows, length, dtype=torch.int64)
        arguments = _resized(kinds[module.kind], length, dtype) if isinstance(module, Block) else {}
        kept: list[Tensor] = []
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        def note(linear: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            inputs.append(arguments[0])
            outputs.append(output)

        for linear in linear_layers(module):
            linear.register_forward_hook(note)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            if isinstance(module, Block):
                module._run(hidden, ids, arguments)
            elif layer == 0:
                module((ids, ids))
            else:
                module.norm(hidden)
        given = _storages(tree_leaves(arguments))
        there = given | _storages(module.state_dict(keep_vars=True).values())
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


def _apart(spec: ModelSpec, flash: bool) -> ModelSpec:
    """The same spec with a config of its own, whose kernels run on fake tensors."""
    config = copy.deepcopy(spec.config)
    config._experts_implementation = EXPERTS
    apart = ModelSpec(spec.family, config, spec.raw, spec.fields)
    apart.set_attention(TORCH if flash else spec.attention[0])
    return apart


def _resized(arguments: dict[str, Any], length: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same for rows of another length."""

    def resized(tensor: Tensor) -> Tensor:
        shape = [length if size == SHORT else size for size in tensor.shape]
        return torch.empty(shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    made: dict[str, Any] = tree_map_only(Tensor, resized, arguments)
    return made


def _any_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As much work and memory as experts take, without looking at who is sent where: [T, H] to [T, H]."""
    count = top_k_index.shape[-1]
    products = F.linear(hidden.repeat_interleave(count, dim=0), module.gate_up_proj[0])
    outputs = F.linear(module._apply_gate(products), module.down_proj[0]) * top_k_weights.reshape(-1, 1)
    return outputs.reshape(-1, count, hidden.shape[-1]).sum(dim=1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _any_experts)

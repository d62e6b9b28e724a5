"""What autograd keeps of a layer between its forward and its backward pass.

Nothing is derived by hand: the layer runs once on fake tensors, which have shapes and no numbers, and each tensor that
autograd saves is counted by its storage. So every family is right by construction, residuals in fp32 included. Masks
and angles are made for a short row and enlarged to the length asked for. Experts stand for each other: each token is
sent to the first ones. Costs 0.1 s a kind of layer and no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

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
    positions = spec.positions() if 0 < layer < spec.n_layers - 1 else None
    arguments = {}
    if positions is not None:
        short = torch.zeros(rows, SHORT, spec.config.hidden_size)
        kinds = positions.arguments(short, torch.arange(SHORT).repeat(rows, 1), None)
    with FakeTensorMode(), _default_dtype(dtype):
        module = spec.build(layer, positions)
        hidden = torch.empty(rows, length, spec.config.hidden_size, requires_grad=True)
        ids = torch.empty(rows, length, dtype=torch.int64)
        if isinstance(module, Block):
            arguments = _resized(kinds[module.kind], length, dtype)
        weights = {tensor.untyped_storage()._cdata for tensor in module.state_dict(keep_vars=True).values()}
        given = {
            tensor.untyped_storage()._cdata: tensor for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor)
        }
        kept: dict[int, Tensor] = {}
        inputs: dict[int, int] = {}
        outputs: list[int] = []

        def note(linear: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            storage = arguments[0].untyped_storage()
            inputs[storage._cdata] = storage.nbytes()
            outputs.append(output.nbytes)

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()._cdata
            if storage not in weights and storage not in given:
                kept[storage] = tensor
            return tensor

        for linear in linear_layers(module):
            linear.register_forward_hook(note)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            if isinstance(module, Block):
                output, added = module._run(hidden, ids, arguments)
            elif layer == 0:
                output, added = module((ids, ids)), None
            else:
                output, added = module.norm(hidden), None
        sizes = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
        shared = sum(tensor.untyped_storage().nbytes() for tensor in given.values())
        del output, added
    return Saved(
        inside=sum(sizes),
        arguments=shared,
        largest=max(sizes, default=0),
        waiting=sum(inputs.values()) + sum(outputs),
    )


def _apart(spec: ModelSpec, flash: bool) -> ModelSpec:
    """The same spec with a config of its own, whose kernels run on fake tensors."""
    config = copy.deepcopy(spec.config)
    config._experts_implementation = EXPERTS
    apart = ModelSpec(spec.family, config, spec.raw, spec.fields)
    apart.set_attention(TORCH if flash else spec.attention[0])
    return apart


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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

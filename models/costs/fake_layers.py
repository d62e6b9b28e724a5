"""One layer of a model on fake tensors, which have shapes and no numbers: what it keeps and does can be counted.

So nothing is derived by hand, and every family is right by construction. Masks and angles are made for a short row and
enlarged to the length asked for. Experts share the tokens evenly. Costs 0.1 s a kind of layer and no memory.

What autograd keeps is counted here, each tensor by its storage, residuals in fp32 included; `models.costs.layer_work`
counts what is done.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, local_torch_dtype

from models.attention.positions import SLIDING
from models.blocks.weight_gradients import linear_layers
from models.layers import Block, Embedding, Head
from models.parallel.peers import Peers, Sharing
from models.parallel.tensor import TensorShare
from models.spec import ModelSpec

SHORT = 23  # the length of the row that masks and angles are made for: no other dimension of a model is a prime like it
EXPERTS = "planned"  # what transformers knows `_even_experts` by
SCORELESS = "planned_attention"  # and `_scoreless`


@dataclass(frozen=True)
class LayerCase:
    """What is looked at.

    Attributes:
        layer: its number.
        rows, length: of a micro-batch.
        flash: attention without scores in memory, whatever the family's usual kernel does.
        sharers: how many processes share the layer, of which one is looked at.
    """

    layer: int
    rows: int
    length: int
    dtype: torch.dtype
    flash: bool = False
    sharers: int = 1


@dataclass(frozen=True)
class FakeLayer:
    """A layer and what it is called with."""

    module: Embedding | Block | Head
    arguments: dict[str, Any]  # masks and angles, which the blocks of a stage share
    _hidden: Tensor
    _ids: Tensor

    def run(self) -> Tensor:
        """The forward pass; of a head the norm alone."""
        if isinstance(self.module, Block):
            return self.module._run(self._hidden, self._ids, self.arguments)[0]
        if isinstance(self.module, Embedding):
            return self.module((self._ids, self._ids))[0]
        output: Tensor = self.module.norm(self._hidden)
        return output

    def run_backward(self, output: Tensor) -> None:
        """The backward pass, without what becomes of the gradients of weights."""
        sources = [self._hidden, *self.module.parameters()]
        torch.autograd.grad(output, sources, torch.empty_like(output), allow_unused=True)


@contextmanager
def fake_layer(spec: ModelSpec, case: LayerCase) -> Iterator[FakeLayer]:
    """A layer that can run inside of the block."""
    layer, rows, length, dtype = case.layer, case.rows, case.length, case.dtype
    config = copy.deepcopy(spec.config)
    config._experts_implementation = EXPERTS
    spec = replace(spec, config=config, _shapes={})
    spec.set_attention(SCORELESS if case.flash else spec.attention[0])
    share = TensorShare(spec, Peers(case.sharers))
    positions = spec.positions(Sharing(tensor=share.peers))
    spec.shapes(layer)  # while tensors are real ones
    short = torch.zeros(rows, SHORT, spec.config.hidden_size)
    kinds = positions.arguments(short, torch.arange(SHORT).repeat(rows, 1), None)
    with FakeTensorMode(), local_torch_dtype(dtype):
        module = spec.build(layer, positions)
        share.narrow(layer, module)
        share.connect(layer, module)
        hidden = torch.empty(rows, length, spec.config.hidden_size, requires_grad=True)
        ids = torch.empty(rows, length, dtype=torch.int64)
        short_arguments = kinds[module.kind] if isinstance(module, Block) else {}
        if case.flash and isinstance(module, Block) and module.kind == SLIDING:
            short_arguments["document_window"] = spec.config.sliding_window
        arguments: dict[str, Any] = tree_map_only(Tensor, partial(_resized, length, dtype), short_arguments)
        yield FakeLayer(module, arguments, hidden, ids)


@dataclass(frozen=True)
class Saved:
    """Bytes for one micro-batch."""

    inside: int  # saved by the layer, its input included where it is saved
    arguments: int  # masks and angles, which the blocks of a stage share
    largest: int  # of the tensors
    # What the gradients of weights are made of, where they wait, as those of embedding and head do not: the linear
    # layers' inputs and the gradients of their outputs.
    waiting: int


def saved_by(spec: ModelSpec, case: LayerCase) -> Saved:
    """What autograd keeps of a layer for a micro-batch until its backward pass."""
    kept: list[Tensor] = []
    ends: list[tuple[Tensor, Tensor]] = []  # inputs and outputs of linear layers

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with fake_layer(spec, case) as fake:
        for linear in linear_layers(fake.module):
            linear.register_forward_hook(lambda _, inputs, output: ends.append((inputs[0], output)))
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            fake.run()
        given = _storages(tree_leaves(fake.arguments))
        there = given | _storages(fake.module.state_dict(keep_vars=True).values())
        inside = [size for storage, size in _storages(kept).items() if storage not in there]
    return Saved(
        inside=sum(inside),
        arguments=sum(given.values()),
        largest=max(inside, default=0),
        waiting=sum(_storages(inputs for inputs, _ in ends).values()) + sum(output.nbytes for _, output in ends),
    )


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """Bytes of what lies under the tensors among some values, each storage once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _resized(length: int, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The same for rows of another length."""
    shape = [length if size == SHORT else size for size in tensor.shape]
    return torch.empty(shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)


def _scoreless(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None = None,
    document_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention that keeps no scores, with whatever is done to them inside of the kernel: [B, heads, S, D].

    Half of the pairs count as skipped, so through a window each token is given twice as many keys as it sees.
    """
    seen = key.shape[2] if document_window is None else min(key.shape[2], 2 * document_window)
    key, value = key[:, :, :seen], value[:, :, :seen]
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


def _even_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As much work and memory as experts take, without looking at who is sent where: [T, H] to [T, H]."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    count, experts = top_k_index.shape[-1], len(first)

    def products(tokens: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(tokens, weight if module.is_transposed else weight.transpose(1, 2))

    sent = hidden.repeat_interleave(count, dim=0)
    missing = -len(sent) % experts
    if missing:
        sent = F.pad(sent, (0, 0, 0, missing))
    inner = products(sent.unflatten(0, (experts, -1)), first)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = products(inner, module.down_proj).flatten(0, 1)
    outputs = outputs[: len(top_k_weights) * count] * top_k_weights.reshape(-1, 1)
    return outputs.reshape(-1, count, hidden.shape[-1]).sum(dim=1).to(hidden.dtype)


ALL_ATTENTION_FUNCTIONS.register(SCORELESS, _scoreless)
ALL_MASK_ATTENTION_FUNCTIONS.register(SCORELESS, sdpa_mask)
ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _even_experts)

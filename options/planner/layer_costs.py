"""Count what a layer computes and keeps, on fake tensors, which have shapes and no numbers.

The layer itself runs, so the counts hold for every family. Masks and angles are made for a short row and enlarged to
the length asked for; experts share the tokens evenly. It takes 0.1 s for each kind of layer, and no memory.

* `saved_by`: bytes that autograd keeps, each storage once, residuals in fp32 included.
* `work_of`: the kernels of a forward and a backward pass with their FLOPs and bytes. Compiled, what lies between two
  products or attention kernels becomes one kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, local_torch_dtype

from models.ahead.layers import LayerAhead
from models.attention.positions import SLIDING
from models.layers import Block, Embedding, Head
from models.parallel.groups import RankGroup, RankGroups
from models.parallel.sequence import PartOfRows
from models.parallel.tensor import TensorShare
from models.spec import ModelSpec
from models.weight_gradients import trained_linear_layers

SHORT = 23  # length of the row that masks and angles are made for; a prime that is no other dimension of a model
EXPERTS, SCORELESS = "planned", "planned_attention"  # transformers' names of `_even_experts` and `_scoreless`


@dataclass(frozen=True)
class LayerCase:
    """A layer and a micro-batch to measure."""

    layer: int  # its number
    rows: int
    length: int
    dtype: torch.dtype
    flash: bool = False  # attention without scores in memory, even where the family's default kernel has them
    tensor: int = 1  # processes that share the layer; one of them is measured


@dataclass(frozen=True)
class FakeLayer:
    """A layer with what it takes."""

    module: Embedding | Block | Head
    arguments: dict[str, Any]  # masks and angles, which the blocks of a stage share
    hidden: Tensor
    ids: Tensor

    def run(self) -> Tensor:
        """Run the forward pass; of a head the norm and the layers ahead."""
        if isinstance(self.module, Block):
            return self.module._run(self.hidden, self.ids, self.arguments)[0]
        if isinstance(self.module, Embedding):
            return self.module((self.ids, self.ids))[0]
        output: Tensor = self.module.norm(self.hidden)
        for layer in self.module.ahead or ():
            assert isinstance(layer, LayerAhead)
            output = layer.through(output, output, partial(self._decode, layer.decoder))
        return output

    def _decode(self, block: Block, hidden: Tensor) -> Tensor:
        return block._run(hidden, self.ids, self.arguments)[0]


@contextmanager
def fake_layer(spec: ModelSpec, case: LayerCase, part: PartOfRows | None = None) -> Iterator[FakeLayer]:
    """Make a layer that runs inside the `with` block.

    Args:
        part: through which attention reaches the tokens of other parts of rows, if any.
    """
    layer, rows, length, dtype = case.layer, case.rows, case.length, case.dtype
    config = copy.deepcopy(spec.config)
    config._experts_implementation = EXPERTS
    spec = replace(spec.blind, config=config, _shapes={})  # transformers cannot initialise a tower of fake tensors
    spec.set_attention(SCORELESS if case.flash else spec.attention[0])

    # Masks and angles are computed for a few real tokens, and resized.
    share = TensorShare(spec, RankGroup(case.tensor))
    positions = spec.positions(RankGroups(tensor=share.ranks))
    positions.part = part
    spec.shapes(layer)  # while tensors are real ones
    short = torch.zeros(rows, SHORT, spec.config.hidden_size)
    kinds = positions.arguments(short, torch.arange(SHORT).repeat(rows, 1), None)

    with FakeTensorMode(), local_torch_dtype(dtype):
        module = spec.build(layer, positions)
        share.narrow(layer, module)
        share.connect(layer, module)
        hidden = torch.empty(rows, length, spec.config.hidden_size, requires_grad=True)
        ids = torch.empty(rows, length, dtype=torch.int64)
        # A head takes a block's arguments where it has layers ahead.
        block = next((each for each in module.modules() if isinstance(each, Block)), None)
        short_arguments = kinds[block.kind] if block else {}
        if case.flash and block and block.kind == SLIDING:
            short_arguments["document_window"] = spec.config.sliding_window
        arguments: dict[str, Any] = tree_map_only(Tensor, partial(_resized, length, dtype), short_arguments)
        if part is not None:
            arguments["part_of_rows"] = part
        yield FakeLayer(module, arguments, hidden, ids)


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps for one micro-batch."""

    inside: int  # saved by the layer, its input included where it is saved
    arguments: int  # masks and angles, which the blocks of a stage share
    largest: int  # of the tensors
    # Inputs of linear layers and gradients of their outputs: kept where gradients of weights are computed later, which
    # those of embedding and head are not.
    waiting: int


def saved_by(spec: ModelSpec, case: LayerCase) -> Saved:
    """Measure what autograd keeps of a layer until its backward pass."""
    kept: list[Tensor] = []
    ends: list[tuple[Tensor, Tensor]] = []  # inputs and outputs of linear layers

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with fake_layer(spec, case) as fake:
        for linear in trained_linear_layers(fake.module):
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
    """Map each storage under some tensors to its bytes."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _resized(length: int, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Make a tensor for rows of another length."""
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
    """Run attention that keeps no scores: [B, heads, S, D].

    A kernel skips half of the pairs that are counted, so through a window each token gets twice the keys that it sees.
    """
    seen = key.shape[2] if document_window is None else min(key.shape[2], 2 * document_window)
    key, value = key[:, :, :seen], value[:, :, :seen]
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


def _even_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Spread tokens evenly over experts, for work and memory alone: [T, H] to [T, H]."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    count, experts = top_k_index.shape[-1], first.shape[0]

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


PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
LOOKUPS = {"embedding", "index_select", "gather", "index"}  # they read no more of their first input than they return
ATTENTION_BACKWARD = 2.5  # times the forward pass, whose scores it computes again (arXiv:2205.14135)

Sizes = dict[int, int]  # bytes by storage


@dataclass(frozen=True)
class Operation:
    """One kernel."""

    kind: str  # `products`, `attention` or `traffic`
    reads: Sizes
    writes: Sizes
    flops: float = 0.0  # of a product or of attention, whose causal half that a kernel may skip is included
    # Of a product's result: products at a time, rows, columns. Of attention: 1, queries, keys.
    shape: tuple[int, int, int] = (1, 1, 1)
    fp8: bool = False  # whether a product's factors are of 8 bits
    weighs: bool = False  # whether it reads a weight of the layer, which of a product is the second factor

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def inner(self) -> int:
        """Return how many numbers each number of a product is a sum over."""
        return round(self.flops / 2 / prod(self.shape))


@dataclass(frozen=True)
class LayerWork:
    """The kernels of one micro-batch, in order."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


def product(rows: int, inner: int, columns: int, itemsize: int, written: int) -> Operation:
    """Describe the product [rows, inner] x [inner, columns].

    Args:
        written: bytes of each element of the result.
    """
    reads = {0: rows * inner * itemsize, 1: inner * columns * itemsize}
    return Operation("products", reads, {2: rows * columns * written}, 2.0 * rows * inner * columns, (1, rows, columns))


def work_of(spec: ModelSpec, case: LayerCase, compiled: bool = False) -> LayerWork:
    """Record the kernels of a layer for a micro-batch, each row one document."""
    with fake_layer(spec, case) as fake:
        with OperationRecorder() as forward:
            output = fake.run()
        with OperationRecorder() as backward:
            sources = [fake.hidden, *(weight for weight in fake.module.parameters() if weight.requires_grad)]
            torch.autograd.grad(output, sources, torch.empty_like(output), allow_unused=True)
        blocks, weights = compiled and isinstance(fake.module, Block), _storages(fake.module.parameters()).keys()
    noted = [*forward.noted, *backward.noted]
    passes = (_fused(each.noted, noted) if blocks else each.noted for each in (forward, backward))
    return LayerWork(*(tuple(_weighing(each, weights)) for each in passes))


def _weighing(operations: Iterable[Operation], weights: Collection[int]) -> Iterator[Operation]:
    """Yield operations, and mark those that read weights."""
    for each in operations:
        yield replace(each, weighs=not each.reads.keys().isdisjoint(weights))


def _fused(operations: Sequence[Operation], everything: Sequence[Operation]) -> list[Operation]:
    """Join neighbouring operations that only move data, as a compiler does."""
    fused: list[Operation] = []
    for kind, group in groupby(operations, lambda operation: operation.kind):
        joined = list(group)
        if kind != "traffic":
            fused += joined
            continue

        # What only these operations write and read is never in memory.
        inside = {id(operation) for operation in joined}
        elsewhere = set(chain.from_iterable(other.reads for other in everything if id(other) not in inside))
        written: dict[int, int] = {}
        read: dict[int, int] = {}
        for operation in joined:
            written |= operation.writes
            read |= operation.reads
        read = {storage: size for storage, size in read.items() if storage not in written}

        last = set(joined[-1].writes)  # which may be the layer's result
        fused.append(Operation(kind, read, {s: size for s, size in written.items() if s in elsewhere | last}))
    return fused


class OperationRecorder(TorchDispatchMode):
    """Record the operations inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Operation] = []
        self._alive: list[Any] = []  # or another tensor's storage would get the number of one that is gone

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._alive += [*inputs, *outputs]
        writes, reads = _sizes(outputs), _sizes(inputs)
        is_view = writes.keys() <= reads.keys() and not function._schema.is_mutable
        if is_view or "empty" in name:
            return result

        if name in PRODUCTS:
            left, right = inputs[-2:]
            shape = (prod(left.shape[:-2]), left.shape[-2], right.shape[-1])
            flops = 2.0 * left.numel() * right.shape[-1]
            self.noted.append(Operation("products", reads, writes, flops, shape))
        elif "scaled_dot_product" in name:
            backward = "backward" in name
            query, key = inputs[1:3] if backward else inputs[:2]
            flops = 4.0 * query.numel() * key.shape[-2] * (ATTENTION_BACKWARD if backward else 1.0)
            self.noted.append(Operation("attention", reads, writes, flops, (1, query.shape[-2], key.shape[-2])))
        else:
            if name in LOOKUPS:
                reads = _sizes(inputs[1:]) | {-1: sum(writes.values())}
            self.noted.append(Operation("traffic", reads, writes))
        return result


def _sizes(tensors: Iterable[Tensor]) -> Sizes:
    """Count the bytes touched of each storage."""
    sizes: Sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = min(tensor.numel() * tensor.itemsize, storage.nbytes())
        sizes[storage._cdata] = max(size, sizes.get(storage._cdata, 0))
    return sizes

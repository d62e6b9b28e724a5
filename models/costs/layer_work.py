"""What a layer does in a forward and a backward pass: FLOPs, bytes that are read and written, kernels.

A layer runs once on fake tensors (`models.costs.fake_layers`), and each operation that torch would launch a kernel for
is noted: matrix products with their shapes, attention kernels, and all the others, which only move data. Compiled, what
lies between two products or attention kernels becomes one kernel, which reads what comes from outside and writes what
is used outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.costs.fake_layers import LayerCase, fake_layer
from models.layers import Block
from models.spec import ModelSpec

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
LOOKUPS = {"embedding", "index_select", "gather", "index"}  # which read of their first input what they give
ATTENTION_BACKWARD = 2.5  # times the forward pass, whose scores it computes again (arXiv:2205.14135)

Sizes = dict[int, int]  # bytes by storage


@dataclass(frozen=True)
class Operation:
    """One kernel."""

    kind: str  # `products`, `attention` or `traffic`
    reads: Sizes
    writes: Sizes
    flops: float = 0.0  # of a product or of attention, whose causal half that a kernel may skip is included
    shape: tuple[int, int, int] = (1, 1, 1)  # of a product's result: products at a time, rows, columns
    fp8: bool = False  # whether a product's factors are of 8 bits

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass(frozen=True)
class LayerWork:
    """The kernels of one micro-batch, in order."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


def product(rows: int, inner: int, columns: int, itemsize: int, written: int) -> Operation:
    """The product [rows, inner] x [inner, columns], with `written` bytes for each element of the result."""
    reads = {0: rows * inner * itemsize, 1: inner * columns * itemsize}
    return Operation("products", reads, {2: rows * columns * written}, 2.0 * rows * inner * columns, (1, rows, columns))


def work_of(spec: ModelSpec, case: LayerCase, compiled: bool = False) -> LayerWork:
    """What a layer does for a micro-batch, each row of it one document."""
    with fake_layer(spec, case) as fake:
        with Recorder() as forward:
            output = fake.run()
        with Recorder() as backward:
            fake.run_backward(output)
        blocks = compiled and isinstance(fake.module, Block)
    noted = [*forward.noted, *backward.noted]
    return LayerWork(*(tuple(_fused(each.noted, noted) if blocks else each.noted) for each in (forward, backward)))


def _fused(operations: Sequence[Operation], everything: Sequence[Operation]) -> list[Operation]:
    """The operations of a pass with what only moves data joined; `everything` is those of both passes."""
    fused: list[Operation] = []
    for kind, group in groupby(operations, lambda operation: operation.kind):
        joined = list(group)
        if kind != "traffic":
            fused += joined
            continue
        inside = {id(operation) for operation in joined}
        elsewhere = {storage for other in everything if id(other) not in inside for storage in other.reads}
        written = {storage: size for each in joined for storage, size in each.writes.items()}
        read = {storage: size for each in joined for storage, size in each.reads.items() if storage not in written}
        last = set(joined[-1].writes)  # which may be the layer's result
        fused.append(Operation(kind, read, {s: size for s, size in written.items() if s in elsewhere | last}))
    return fused


class Recorder(TorchDispatchMode):
    """Notes the operations of the block."""

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
            query, key = inputs[backward : backward + 2]
            flops = 4.0 * query.numel() * key.shape[-2] * (ATTENTION_BACKWARD if backward else 1.0)
            self.noted.append(Operation("attention", reads, writes, flops))
        else:
            if name in LOOKUPS:
                reads = _sizes(inputs[1:]) | {-1: sum(writes.values())}
            self.noted.append(Operation("traffic", reads, writes))
        return result


def _sizes(tensors: Iterable[Tensor]) -> Sizes:
    """Bytes that are touched of each storage; what is expanded lies there once."""
    sizes: Sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = min(tensor.numel() * tensor.itemsize, storage.nbytes())
        sizes[storage._cdata] = max(size, sizes.get(storage._cdata, 0))
    return sizes

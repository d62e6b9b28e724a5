"""Count what the tower of images in the first layer computes and keeps, on fake tensors.

The tower itself runs, on images of the records' mean size. What it computes of their sizes, grids of patches and where
windows begin, are real numbers; pixels, weights and all that comes of them have shapes alone. Towers that take images
of any size attend to each image, or to each window, by a call of its own; here it is one call for all, with as many
pairs, which is then counted as so many.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import ceil, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.images.embedding import SeeingEmbedding
from models.images.tensors import GRIDS, MASK
from models.spec import ModelSpec
from options.planner.inputs import Basis
from options.planner.layer_costs import LayerWork, Operation, OperationRecorder
from training.config.precision import training_dtype

TOGETHER = "planned_flash_tower"  # transformers hands on where images and windows begin to what is named flash
MOST = 8  # images that are counted; of more, each takes as much
LARGE = 2**20  # numbers of a mask that is made of nothing, from which on it is fake, too
Calls = dict[tuple[int, int], int]  # by queries and keys of a call of attention, how many calls it stands for


@dataclass(frozen=True)
class TowerCase:
    """Images to count, all alike."""

    images: int
    tokens: int  # of each
    dtype: torch.dtype
    recompute: bool = False


@dataclass(frozen=True)
class TowerWork:
    """The kernels for so many tokens of images."""

    kernels: LayerWork
    tokens: int


@dataclass(frozen=True)
class TowerMemory:
    """Bytes for a micro-batch's images.

    Attributes:
        pixels: as they come, which stay until the backward pass.
        kept: what autograd keeps.
        peak: most of a forward or a backward pass, with what is kept, and the copy of the pixels that a forward pass
            takes; not the pixels themselves.
    """

    pixels: float = 0.0
    kept: float = 0.0
    peak: float = 0.0


def tower_work(basis: Basis) -> tuple[LayerWork, float]:
    """Return the kernels for some images, and how often they count for a micro-batch on average."""
    images = basis.share.images
    found = basis.once(work_of, _case(basis, images.number))
    return found.kernels, images.number * images.tokens / found.tokens


def tower_memory(basis: Basis) -> TowerMemory:
    """Return what the images of a micro-batch take that has most of them."""
    images = basis.share.images
    if not (basis.spec.family.sees and images.most):
        return TowerMemory()
    found, tokens = basis.once(memory_of, _case(basis, images.most / images.tokens))
    return TowerMemory(*(images.most / tokens * each for each in vars(found).values()))


def _case(basis: Basis, images: float) -> TowerCase:
    tokens, dtype = round(basis.share.images.tokens), training_dtype(basis.config)
    return TowerCase(min(MOST, ceil(images)), tokens, dtype, 0 in basis.computed_again)


def work_of(spec: ModelSpec, case: TowerCase) -> TowerWork:
    """Record the kernels of a forward and a backward pass."""
    with _fake_tower(spec, case) as (run, images, calls):
        with OperationRecorder() as forward:
            features = run(images)
        with OperationRecorder() as backward:
            go_back(features)
    passes = (tuple(_apart(each.noted, calls)) for each in (forward, backward))
    return TowerWork(LayerWork(*passes), len(features[0]))


def memory_of(spec: ModelSpec, case: TowerCase) -> tuple[TowerMemory, int]:
    """Measure the memory of a forward and a backward pass; return also the tokens that the images take.

    DeepSpeed hands a forward pass a copy of what a stage takes (`PipelineEngine._exec_forward_pass`). A tower that is
    trained keeps it.
    """
    with _fake_tower(spec, case) as (run, images, _), LiveBytes() as live:
        features = run([each.clone() for each in images])
        kept = live.now if features[0].requires_grad else 0
        go_back(features)
    return TowerMemory(sum(each.nbytes for each in images), kept, live.most), len(features[0])


def go_back(features: Sequence[Tensor]) -> None:
    """Run the backward pass of a tower, if anything of it is trained."""
    if features[0].requires_grad:
        torch.autograd.backward(features, [torch.empty_like(each) for each in features])


@contextmanager
def _fake_tower(
    spec: ModelSpec, case: TowerCase
) -> Iterator[tuple[Callable[[Sequence[Tensor]], list[Tensor]], list[Tensor], Calls]]:
    """Make a tower that runs inside the `with` block; give its forward pass, the tensors of its images, and its calls.

    How many calls of attention each one stands for is known once it has run.
    """
    sees = spec.family.sees
    assert sees is not None
    with torch.device("meta"):
        module = spec.build(0).to(case.dtype).train()
    assert isinstance(module, SeeingEmbedding)
    module.recompute = case.recompute

    # Only what has a fake factor is fake, so that sizes may be asked for their numbers.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        module.to_empty(device="cpu")

    def pixels(*shape: int) -> Tensor:
        if MASK in sees.inputs:  # a tower that asks of pixels whether they are padding, which is 0
            return torch.ones(shape)
        with fake:
            return torch.empty(shape)

    images = sees.pictures(case.images, case.tokens, pixels)
    for weight in module.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(_forget)
    calls: Calls = {}
    if GRIDS in sees.inputs:
        ALL_ATTENTION_FUNCTIONS.register(TOGETHER, partial(_together, calls))
        for part in module.eyes.modules():
            if hasattr(part, "config"):
                part.config._attn_implementation = TOGETHER
    with _LargeIsFake(fake):
        yield module.features, images, calls


def _forget(weight: Tensor) -> None:
    weight.grad = None


def _together(
    calls: Calls,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run the attention of all images or windows, [1, heads, S, D], in one call that has as many pairs."""
    if cu_seq_lens_q is not None:
        lengths = cu_seq_lens_q.diff().double()
        seen = round(float(lengths.square().sum() / lengths.sum()))
        key, value = key[:, :, :seen], value[:, :, :seen]
        calls[query.shape[2], seen] = len(lengths)
    output = F.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2).contiguous()
    return output if cu_seq_lens_q is None else output.clone(), None  # what several calls give is joined


def _apart(operations: Sequence[Operation], calls: Calls) -> Iterator[Operation]:
    """Yield operations, one of attention for each call that it stands for."""
    for each in operations:
        times = calls.get(each.shape[1:], 1) if each.kind == "attention" else 1
        reads = {storage: size // times for storage, size in each.reads.items()}
        writes = {storage: size // times for storage, size in each.writes.items()}
        yield from times * [replace(each, reads=reads, writes=writes, flops=each.flops / times)]


class _LargeIsFake(TorchDispatchMode):
    """Let masks be fake that are made of nothing, and would take as much memory here as in a run.

    And let masks that are not fake choose what is: how much they choose is known.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.full.default and prod(args[0]) > LARGE:
            with self._fake:
                return function(*args, **(kwargs or {}))
        if function is torch.ops.aten.index.Tensor and isinstance(args[0], FakeTensor):
            args = args[0], list(chain.from_iterable(map(_places, args[1])))
        return function(*args, **(kwargs or {}))


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """Write a mask as the places that it chooses."""
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return [index]
    return index.nonzero().unbind(1)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that are made inside the `with` block.

    Attributes:
        now: of those that are there.
        most: that there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in given:
                given.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _gone(self, size: int) -> None:
        self.now -= size

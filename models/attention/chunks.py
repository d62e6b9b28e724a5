"""Rows in chunks: attention of some tokens of a row to all that the row has had before.

A row that is too long for a process's memory passes through its layers chunk by chunk. Its keys and values, behind the
rotary embedding, stay in one buffer a layer; each chunk adds its own and attends to all up to its end. Backward passes
go from the last chunk to the first: each gives the keys and values of earlier chunks their gradients, which are added
up in fp32 until the chunk that made them takes the sum. Linear attention hands on states (`models.attention.states`),
and a loss that is no sum the sums that it is a function of. Where nothing else joins tokens, as `models.derived.proof`
finds out, losses and gradients are those of whole rows, but for the rounding of other sums.

A chunk is a part of a row, as a process's share of it is with sequence parallelism (`models.parallel.sequence`).

Cost: of each row on its way, keys and values of all layers; of a row that has begun its backward passes, twice as many
bytes in all in fp32, and three times in 16 bits. A block that recomputes makes its chunk's keys and values again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from models.attention.packed import Documents
from models.attention.states import HandedOn, Held, Mixer, mix
from models.parallel.sequence import Kernel, PartOfRows

BLOCK = 1024  # queries that one mask is made for: of more, masks would be the largest tensors


class _Kept:
    """One layer's keys and values of the rows of a micro-batch, [B, heads, S, D], and the sums of their gradients."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        self._held = [each.new_empty(*each.shape[:2], length, each.shape[3]) for each in (keys, values)]
        self._sums: list[Tensor] = []

    def extend(self, begin: int, new: Sequence[Tensor]) -> Iterator[Tensor]:
        """Put in the keys and values of a chunk; yield those of the row up to its end."""
        for held, added in zip(self._held, new, strict=True):
            end = begin + added.shape[2]
            # `data` has a version of its own: what earlier chunks have saved for their backward passes stays as it is.
            held.data[:, :, begin:end] = added
            yield held.data[:, :, :end]

    def collect(self, begin: int, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        """Add what a chunk says of earlier ones to the sums; yield the whole gradients of its own."""
        if not self._sums:  # of the last chunk, which comes first
            self._sums = [each.new_zeros(each.shape, dtype=torch.float32) for each in gradients]
        for total, gradient in zip(self._sums, gradients, strict=True):
            end = gradient.shape[2]
            total[:, :, :end] += gradient
            yield total[:, :, begin:end].to(gradient.dtype)
        if begin == 0:  # the row is back; graphs of its chunks may stay until other units take their places
            self._held, self._sums = [], []


class _Extended(torch.autograd.Function):
    """Put the keys and values of the row's earlier chunks in front of a chunk's own."""

    @staticmethod
    def forward(context: Any, key: Tensor, value: Tensor, kept: _Kept, begin: int) -> tuple[Tensor, ...]:
        context.kept, context.begin = kept, begin
        return tuple(kept.extend(begin, (key, value)))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *context.kept.collect(context.begin, gradients), None, None


class _RowSums:
    """A sum over the tokens of each chunk, by where the chunk begins, and the gradient of the sum over all."""

    def __init__(self) -> None:
        self.parts: dict[int, Tensor] = {}
        self.gradient: Tensor | None = None


class _Summed(torch.autograd.Function):
    """Add the sums of the row's earlier chunks to a chunk's own."""

    @staticmethod
    def forward(context: Any, own: Tensor, sums: _RowSums, begin: int) -> Tensor:
        context.sums, context.begin = sums, begin
        sums.parts[begin] = own.detach()
        return torch.stack(list(sums.parts.values())).sum(dim=0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Take what later chunks, which had their backward passes before, say of this chunk's tokens, too."""
        sums = context.sums
        if context.begin != max(sums.parts):
            raise RuntimeError("a sum without its gradient; expected the backward pass of the row's next chunk before")
        del sums.parts[context.begin]
        sums.gradient = gradient if sums.gradient is None else sums.gradient + gradient
        return sums.gradient, None, None


class HeadGradient:
    """The gradient of the head's weight, of all chunks (`models.loss.lean`)."""

    total: Tensor | None = None


class RowMemory:
    """What the layers of a stage keep of one micro-batch whose rows pass in chunks.

    Args:
        length: of its rows.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._layers: dict[nn.Module, _Kept] = {}
        self.states: dict[tuple[nn.Module, int, int], HandedOn] = {}  # by mixer, row and the column behind them
        self.head_gradient = HeadGradient()
        self.sums: defaultdict[int, _RowSums] = defaultdict(_RowSums)  # by their order in a chunk

    def extend(self, module: nn.Module, key: Tensor, value: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """Add a chunk's keys and values of one attention module; return those of the row up to the chunk's end."""
        if module not in self._layers:
            self._layers[module] = _Kept(key, value, self.length)
        keys, values = _Extended.apply(key, value, self._layers[module], begin)
        return keys, values

    def keep(self, place: tuple[nn.Module, int, int], held: Held) -> HandedOn:
        """Keep what a mixer leaves for the next chunk; a block that recomputes leaves the same again."""
        return self.states.setdefault(place, HandedOn(held))


class RowChunk(PartOfRows):
    """Some tokens of each row of a micro-batch, behind all before them.

    A loss that is a function of `summed` numbers is right if those of all chunks but the last count 0 times.

    Args:
        columns: the tokens.
        memory: of the micro-batch, on this stage.
    """

    def __init__(self, columns: slice, memory: RowMemory) -> None:
        self.columns, self._memory = columns, memory
        self._asked = 0  # sums that its loss has asked for

    @property
    def head_gradient(self) -> HeadGradient:
        return self._memory.head_gradient

    def own(self, whole: Tensor, dim: int) -> Tensor:
        part = whole.narrow(dim, self.columns.start, self.columns.stop - self.columns.start)
        # Not `contiguous`: of a single row that is a view, and each chunk on its way would keep a whole row's angles.
        return part.clone(memory_format=torch.contiguous_format)

    def attend(
        self,
        kernel: Kernel,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        documents: Documents | None = None,
        document_window: int | None = None,
        **options: Any,
    ) -> Tensor:
        begin, end = self.columns.start, self.columns.stop
        key, value = self._memory.extend(module, key, value, begin)
        if documents is None:  # a mask for the chunk's queries
            return kernel(module, query, key, value, mask, **options)[0]
        if "cu_seq_lens_q" in options:
            windowed = {} if document_window is None else {"document_window": document_window}
            launch = partial(kernel, module, attention_mask=None, **windowed, **options)
            return self._in_one_launch(launch, query, key, value, documents)
        attended = _Attended(kernel, module, begin, document_window, options)
        if not documents.packed:  # all rows are one document each
            return attended(query, key, value, 0, end)
        rows = []
        for row in range(len(query)):
            own = slice(row, row + 1)
            here = (query[own], key[own], value[own])
            pieces = documents.within(row, begin, end)
            rows.append(torch.cat([attended(*here, first, min(last, end)) for first, last in pieces], dim=1))
        return torch.cat(rows)

    def _in_one_launch(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
        """Lay rows end to end, of keys what is of documents that the chunk has tokens of."""
        begin, end = self.columns.start, self.columns.stop
        firsts = [next(documents.within(row, begin, end))[0] for row in range(len(query))]
        keys = _end_to_end([key[row : row + 1, :, first:end] for row, first in enumerate(firsts)])
        values = _end_to_end([value[row : row + 1, :, first:end] for row, first in enumerate(firsts)])
        output = kernel(query=_end_to_end(query.split(1)), key=keys, value=values)[0]
        return output.view(len(query), -1, *output.shape[2:])

    def mix(
        self, mixer: nn.Module, together: Mixer, hidden: Tensor, documents: Documents | None, **options: Any
    ) -> Tensor:
        begin, end = self.columns.start, self.columns.stop
        # By the mixer's own name for it, as the block hands on as a cache what `Positions` gave it: this chunk.
        names = [name for name, value in options.items() if value is self]
        tensors = {name for name, value in options.items() if _has_tensors(value)}
        if not documents or len(names) != 1 or tensors & signature(together).parameters.keys():
            raise TypeError("a mixer that is given no cache, or more tensors than hidden states; expected no chunks")
        # Some blocks pass on whatever they are given: angles, which are for attention.
        named = partial(together, **{name: options[name] for name in options.keys() - tensors - {*names}})

        def mixed(row: int, tokens: Tensor, first: int, last: int) -> Tensor:
            """Mix the tokens of the chunk that belong to the document `first` to `last` of the row."""
            before = self._memory.states[mixer, row, begin] if first < begin else None
            keep = partial(self._memory.keep, (mixer, row, end)) if last > end else None
            own = tokens[:, max(first, begin) - begin : min(last, end) - begin]
            return mix(named, names[0], own, before, keep)

        rows, packed = [], documents.packed  # else all rows are one document each, and mixed at once
        for row in range(len(documents.rows) if packed else 1):
            tokens = hidden[row : row + 1] if packed else hidden
            pieces = documents.within(row, begin, end)
            rows.append(torch.cat([mixed(row, tokens, *document) for document in pieces], dim=1))
        return torch.cat(rows)

    def summed(self, own: Tensor) -> Tensor:
        self._asked += 1
        total: Tensor = _Summed.apply(own, self._memory.sums[self._asked], self.columns.start)
        return total


def _has_tensors(value: Any) -> bool:
    return any(isinstance(each, Tensor) for each in tree_leaves(value))


def _end_to_end(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=2)


class _Attended:
    """Attention of the queries of a chunk that begins at `begin` to one document at a time."""

    def __init__(
        self, kernel: Kernel, module: nn.Module, begin: int, window: int | None, options: dict[str, Any]
    ) -> None:
        self._kernel, self._module, self._begin = kernel, module, begin
        self._window, self._options = window, options

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, first: int, last: int) -> Tensor:
        """Attend inside of the document whose tokens are `first` to `last` of the row; `last` is in the chunk."""
        start = max(first, self._begin)
        queries = query[:, :, start - self._begin : last - self._begin]
        if start == first:  # nothing of the document came before
            keys = (tensor[:, :, first:last] for tensor in (key, value))
            whole = Documents([[last - first]] * len(query))
            named = {"documents": whole, "document_window": self._window}
            return self._kernel(self._module, queries, *keys, None, **named, **self._options)[0]
        outputs = []
        for begin in range(start, last, BLOCK):
            end = min(begin + BLOCK, last)
            least = first if self._window is None else max(first, begin - self._window + 1)
            asked = queries[:, :, begin - start : end - start]
            keys = (tensor[:, :, least:end] for tensor in (key, value))
            mask = _seen(begin, end, least, self._window, query)
            outputs.append(self._kernel(self._module, asked, *keys, mask, **self._options)[0])
        return torch.cat(outputs, dim=1)


def _seen(begin: int, end: int, least: int, window: int | None, like: Tensor) -> Tensor:
    """Make the mask of queries `begin` to `end` over keys `least` to `end`, which is added to scores."""
    # In truth values: distances are int64, twice the mask of fp32 numbers.
    every = torch.ones(end - begin, end - least, dtype=torch.bool, device=like.device)
    unseen = every.triu(begin - least + 1)
    if window is not None:
        unseen |= every.tril(begin - least - window)
    return like.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))[None, None]


def chunks_of(cuts: Sequence[int]) -> list[RowChunk | None]:
    """Make the chunks of a micro-batch of one stage, in their order; a single one is the whole rows.

    Args:
        cuts: the tokens of each chunk.
    """
    if len(cuts) == 1:
        return [None]
    memory = RowMemory(sum(cuts))
    return [RowChunk(slice(first, last), memory) for first, last in pairwise(accumulate(cuts, initial=0))]

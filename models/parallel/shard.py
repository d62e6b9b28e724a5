"""Which part of a weight a process holds: whole rows or columns of it, in one range or several."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, product
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A weight sharded along one of its dimensions.

    Attributes:
        shape: of the whole weight.
        side: the sharded dimension, from 0.
        ranges: what the process has of it, in order: several where matrices are stacked in one weight.
    """

    shape: tuple[int, ...]
    side: int
    ranges: tuple[range, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.side], self.width, *self.shape[self.side + 1 :])

    def meets(self, other: Shard) -> bool:
        """Return whether two shards may overlap."""
        pairs = product(self.ranges, other.ranges)
        return self.side != other.side or any(one.start < two.stop and two.start < one.stop for one, two in pairs)

    def of(self, whole: Tensor) -> Tensor:
        """Cut the shard out of a whole weight; a view if it is one range."""
        parts = [whole.narrow(self.side, each.start, len(each)) for each in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.side)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copy the shard to its place in the whole weight."""
        begin = 0
        for each in self.ranges:
            whole.narrow(self.side, each.start, len(each)).copy_(part.narrow(self.side, begin, len(each)))
            begin += len(each)

    def in_whole(self, places: Tensor) -> Tensor:
        """Map places in the flattened shard to places in the flattened weight."""
        outer, own = self._step(self.width)
        inside = self._held[places // outer % self.width] * outer + places % outer
        return places // own * self._step(self.shape[self.side])[1] + inside

    def in_part(self, places: Tensor) -> Tensor:
        """Map places in the flattened weight to the shard; -1 outside of it."""
        outer, whole = self._step(self.shape[self.side])
        held = torch.full((self.shape[self.side],), -1).scatter_(0, self._held, torch.arange(self.width))
        found = held[places // outer % self.shape[self.side]]
        inside = places // whole * self._step(self.width)[1] + found * outer + places % outer
        return torch.where(found < 0, -1, inside)

    @cached_property
    def width(self) -> int:
        return sum(map(len, self.ranges))

    @cached_property
    def _held(self) -> Tensor:
        return torch.tensor(list(chain.from_iterable(self.ranges)))

    def _step(self, width: int) -> tuple[int, int]:
        """Elements between rows or columns, and between stacks of `width` of them."""
        inner = prod(self.shape[self.side + 1 :])
        return inner, inner * width


CHUNK = 2**20  # elements
Range = tuple[Shard | None, int, int]  # of a flattened part, or of the whole weight: its begin, and how many elements


def in_common(one: Range, other: Range) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the places that two ranges of shards have in common, in either shard.

    Cost: some 20 passes over int64 numbers, as many as there are between the first and the last of them.
    """
    if not (one[2] and other[2]):
        return
    begin, end = (_place(other, place) for place in (other[1], other[1] + other[2] - 1))
    places = range(one[1], one[1] + one[2])
    start = bisect_left(places, begin, key=partial(_place, one))
    stop = bisect_right(places, end, key=partial(_place, one))
    for first in range(start, stop, CHUNK):
        own = torch.arange(one[1] + first, one[1] + min(first + CHUNK, stop))
        whole = one[0].in_whole(own) if one[0] else own
        found = other[0].in_part(whole) if other[0] else whole
        inside = (found >= other[1]) & (found < other[1] + other[2])
        yield own[inside], found[inside]


def _place(part: Range, place: int) -> int:
    return int(part[0].in_whole(torch.tensor([place]))) if part[0] else place

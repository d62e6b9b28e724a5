"""Split a model's layers into stages so that the slowest rank is as fast as possible.

Layers stay in their order. Among equally fast splits the most even one is taken (the least sum of squares), and among
equals the one that gives the first ranks more (with the V schedule less). Costs are whole numbers, so that no rounding
decides: the same costs give the same split everywhere.

A rank holds one range of layers, from the first rank on, or two with the V schedule (DualPipeV): rank r of P has stages
r and 2P - 1 - r, from the outermost pair to the innermost one. An exact, memoized search finds the slowest rank within
a limit that grows from an even share until there is a split; its answer bounds another search, for the most even one.
With N layers and P ranks this takes some P x N^2 steps, with the V schedule some more: milliseconds to a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate, chain
from math import inf

from training.topology import layer_ranges

LayerRange = tuple[int, int]  # [begin, end)
Fits = Callable[[int, tuple[LayerRange, ...]], bool]
FIRST_GROWTH = 4  # the limit grows by 1/4 first, then by twice as much each time


def layers_of(ranges: Iterable[LayerRange]) -> list[int]:
    """Return the layers in these ranges."""
    return list(chain.from_iterable(range(begin, end) for begin, end in ranges))


def held_layers(parts: Sequence[int], ranks: int) -> list[tuple[LayerRange, ...]]:
    """Return the ranges of layers of each rank: one, or two where there are twice as many stages."""
    ranges = layer_ranges(parts)
    if len(ranges) == ranks:
        return [(each,) for each in ranges]
    return list(zip(ranges[:ranks], reversed(ranges), strict=False))


def best_split(
    costs: Sequence[Sequence[int]], fits: Fits, v_schedule: bool = False, most: float = inf, first: int = 1
) -> list[int] | None:
    """Return layers per stage, at least one each; None where no split fits.

    Args:
        costs: of each rank that of each layer, whole numbers of any unit.
        fits: whether a rank has the memory for these layers; a part of what fits has to fit too.
        v_schedule: two stages a rank; the result has 2 x `ranks` entries, in the order of the layers.
        most: cost of the slowest rank; slower splits need not be found.
        first: how many layers the first stage has at least.
    """
    ranks, least = len(costs), list(map(min, zip(*costs, strict=True)))
    if len(least) < ranks * (2 if v_schedule else 1) + first - 1:
        return None
    totals = [[0, *accumulate(each)] for each in (*costs, least)]
    search = partial(_best, totals, ranks, cache(fits), v_schedule, first)
    limit = -(-sum(least) // ranks)  # no split is faster
    largest = max(map(sum, costs))
    growth = limit // FIRST_GROWTH + 1
    while (found := search(limit)) is None and limit < min(largest, most):
        limit, growth = min(largest, limit + growth), 2 * growth
    most_even = search(found[0], even=True) if found else None
    return most_even[1] if most_even else None


def _best(
    totals: Sequence[Sequence[int]],
    ranks: int,
    fits: Fits,
    v_schedule: bool,
    first: int,
    limit: int,
    even: bool = False,
) -> tuple[int, list[int]] | None:
    """Return the value of the best split in which no rank exceeds the limit, and the split.

    Args:
        totals: of each rank, and at last the least of all, cumulative costs.
        even: by the sum of the stages' squares instead of by the slowest rank.
    """

    def cost(rank: int, begin: int, end: int) -> int:
        return totals[rank][end] - totals[rank][begin]

    def first_ends(begin: int, end: int, others: int) -> range:
        """Say where the first range of a rank in [begin, end) may end, with `others` ranks to follow."""
        least = begin + 1 if begin else first
        if v_schedule:
            return range(least, end - 2 * others)
        return range(least, end - others + 1) if others else range(end, end + 1)

    def last_begins(x: int, end: int, others: int) -> range:
        """Say where its last range may begin; at the end where there is one stage a rank."""
        if not v_schedule:
            return range(end, end + 1)
        return range(x + 2 * others, end) if others else range(x, x + 1)

    @cache
    def search(rank: int, begin: int, end: int) -> tuple[int, list[int]] | None:
        others = ranks - rank - 1
        best: tuple[int, list[int]] | None = None
        for x in first_ends(begin, end, others):
            if cost(rank, begin, x) > limit:
                break
            for y in reversed(last_begins(x, end, others)):
                left, right = cost(rank, begin, x), cost(rank, y, end)
                if left + right > limit or not fits(rank, ((begin, x), (y, end)) if v_schedule else ((begin, x),)):
                    break
                if cost(ranks, x, y) > others * limit:
                    continue

                value = left**2 + right**2 if even else left + right
                inner: list[int] = []
                if others:
                    rest = search(rank + 1, x, y)
                    if rest is None:
                        continue
                    value = value + rest[0] if even else max(value, rest[0])
                    inner = rest[1]
                # Of equal splits the one that gives the first ranks more is found last, with the V schedule first.
                if best is None or value < best[0] or (value == best[0] and not v_schedule):
                    best = value, [x - begin, *inner, *([end - y] if v_schedule else [])]
        return best

    return search(0, 0, len(totals[0]) - 1)

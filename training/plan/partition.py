"""The best division of a model's layers: the slowest rank as fast as it can be.

The slowest rank sets the speed of a pipeline. Layers stay in their order, so a division is a row of cuts. Among those
that are equally fast, the one whose work is spread most evenly is taken (the least sum of squares), and among equals
the one that gives the first ranks more (with the V schedule less). Costs are whole numbers, so that no rounding
decides: the same costs give the same division everywhere.

A rank holds one range of layers, from the first rank on, or two with the V schedule (DualPipeV): rank r of P has stages
r and 2P - 1 - r, from the outermost pair to the innermost one. What the first ranks leave is then a range in the
middle, else one at the end. A first guess keeps, for every beginning of it, only the smallest end: nearly always the
best, but not always, as each stage needs a layer. It bounds a search that remembers what it saw and is exact, for the
slowest rank; the answer of that one bounds another for the evenness. With N layers and P ranks this takes some P x N^2
steps, with the V schedule some more: milliseconds to a second for the models there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

LayerRange = tuple[int, int]  # [begin, end)
Fits = Callable[[int, tuple[LayerRange, ...]], bool]


def best_split(costs: Sequence[int], ranks: int, fits: Fits, v_schedule: bool = False) -> list[int] | None:
    """Layers per stage, at least one each; None where no division fits.

    Args:
        costs: of each layer, whole numbers of any unit.
        ranks: that share the layers.
        fits: whether a rank has the memory for these layers; a part of what fits has to fit too.
        v_schedule: two stages a rank; the answer has 2 x `ranks` entries, in the order of the layers.
    """
    if len(costs) < ranks * (2 if v_schedule else 1):
        return None
    return _Search(costs, ranks, fits, v_schedule).best()


class _Search:
    def __init__(self, costs: Sequence[int], ranks: int, fits: Fits, v_schedule: bool) -> None:
        self.layers = len(costs)
        self.ranks = ranks
        self.total = [0, *accumulate(costs)]
        self.fits = cache(fits)
        self.v_schedule = v_schedule

    def best(self) -> list[int] | None:
        low, high = 0, self.total[-1]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._guess(middle) else (middle + 1, high)
        found = self._search(high, even=False)
        most_even = self._search(found[0], even=True) if found else None
        return most_even[1] if most_even else None

    def _cost(self, begin: int, end: int) -> int:
        return self.total[end] - self.total[begin]

    def _takes(self, rank: int, begin: int, x: int, y: int, end: int, limit: int) -> bool:
        if self._cost(begin, x) + self._cost(y, end) > limit:
            return False
        return self.fits(rank, ((begin, x), (y, end)) if self.v_schedule else ((begin, x),))

    def _first_ends(self, begin: int, end: int, others: int) -> range:
        """Where the first layers that a rank takes of [begin, end) may end, when so many ranks follow."""
        if self.v_schedule:
            return range(begin + 1, end - 2 * others)
        return range(begin + 1, end - others + 1) if others else range(end, end + 1)

    def _last_begins(self, x: int, end: int, others: int) -> range:
        """Where the last ones may begin; at the end where there is one stage a rank."""
        if not self.v_schedule:
            return range(end, end + 1)
        return range(x + 2 * others, end) if others else range(x, x + 1)

    def _guess(self, limit: int) -> bool:
        """Whether every rank stays within the limit when each leaves as little as it can."""
        left = {0: self.layers}
        for rank in range(self.ranks):
            others = self.ranks - rank - 1
            after: dict[int, int] = {}
            for begin, end in left.items():
                for x in self._first_ends(begin, end, others):
                    starts = self._last_begins(x, end, others)
                    y = next((y for y in starts if self._takes(rank, begin, x, y, end, limit)), None)
                    if y is not None:
                        after[x] = min(after.get(x, self.layers), y)
                    elif others:
                        break  # more on the left leaves less room on the right
            left = after if self.v_schedule else dict([*after.items()][-1:])
        return bool(left)

    def _search(self, limit: int, even: bool) -> tuple[int, list[int]] | None:
        """The best division in which no rank exceeds the limit, with its value.

        Args:
            even: by the sum of the stages' squares instead of by the slowest rank.
        """

        @cache
        def search(rank: int, begin: int, end: int) -> tuple[int, int, int] | None:
            others = self.ranks - rank - 1
            best: tuple[int, int, int] | None = None
            for x in self._first_ends(begin, end, others):
                if self._cost(begin, x) > limit:
                    break
                for y in reversed(self._last_begins(x, end, others)):
                    if not self._takes(rank, begin, x, y, end, limit):
                        break
                    if self._cost(x, y) > others * limit:
                        continue
                    left, right = self._cost(begin, x), self._cost(y, end)
                    value = left**2 + right**2 if even else left + right
                    if others:
                        rest = search(rank + 1, x, y)
                        if rest is None:
                            continue
                        value = value + rest[0] if even else max(value, rest[0])
                    if best is None or value < best[0] + (not self.v_schedule):
                        best = value, x, y
            return best

        outward, returning = [], []
        begin, end = 0, self.layers
        values = []
        for rank in range(self.ranks):
            found = search(rank, begin, end)
            if found is None:
                return None
            value, x, y = found
            values.append(value)
            outward.append(x - begin)
            returning.append(end - y)
            begin, end = x, y
        return values[0], [*outward, *reversed(returning)] if self.v_schedule else outward

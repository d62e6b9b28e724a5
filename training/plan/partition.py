"""The best division of a model's layers: the slowest rank as fast as it can be.

The slowest rank sets the speed of a pipeline. Layers stay in their order, so a division is a row of cuts, and dynamic
programming over (rank, cut) finds the best of all of them exactly. Among those that are equally fast, the one whose
work is spread most evenly is taken (the least sum of squares), and among equals the one that gives later stages less.
Costs are whole numbers, so that no rounding decides: the same costs give the same division everywhere.

A rank holds one stretch of layers, or, `folded`, two: rank r of P has stages r and 2P - 1 - r (DualPipeV). With N
layers and P ranks it takes some P x N^2 steps, folded some more: milliseconds to a second for the models there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

Stretch = tuple[int, int]  # layers [begin, end)
Fits = Callable[[int, tuple[Stretch, ...]], bool]


def best_split(costs: Sequence[int], ranks: int, fits: Fits, folded: bool = False) -> list[int] | None:
    """Layers per stage, at least one each; None where no division fits.

    Args:
        costs: of each layer, whole numbers of any unit.
        ranks: that share the layers.
        fits: whether a rank has the memory for these stretches; a part of what fits has to fit too.
        folded: two stages a rank; the answer has 2 x `ranks` entries, in the order of the layers.
    """
    if len(costs) < ranks * (2 if folded else 1):
        return None
    return _Folded(costs, ranks, fits).best() if folded else _straight(costs, ranks, fits)


def _straight(costs: Sequence[int], ranks: int, fits: Fits) -> list[int] | None:
    """One stretch a rank: two rounds of the same programming, for the slowest rank and then for the evenness."""
    total = [0, *accumulate(costs)]
    slowest = _program(total, ranks, fits, None)
    if slowest is None:
        return None
    limit = max(total[end] - total[begin] for begin, end in _stretches(slowest))
    return _program(total, ranks, fits, limit)


def _program(total: Sequence[int], ranks: int, fits: Fits, limit: int | None) -> list[int] | None:
    """The division with the smallest largest rank, or, with a limit for each, with the least sum of squares."""
    layers = len(total) - 1
    best: list[int | None] = [0] + [None] * layers  # over the ranks so far, by how many layers they hold
    cuts: list[list[int]] = []
    for rank in range(ranks):
        row: list[int | None] = [None] * (layers + 1)
        cut = [0] * (layers + 1)
        for end in range(rank + 1, layers - (ranks - rank - 1) + 1):
            for begin in range(end - 1, rank - 1, -1):
                cost = total[end] - total[begin]
                known, before = row[end], best[begin]
                if limit is not None and cost > limit:
                    break
                if limit is None and known is not None and cost >= known:
                    break
                if before is None:
                    continue
                value = max(before, cost) if limit is None else before + cost**2
                if (known is None or value < known) and fits(rank, ((begin, end),)):
                    row[end], cut[end] = value, begin
        best = row
        cuts.append(cut)
    if best[layers] is None:
        return None
    parts, end = [], layers
    for cut in reversed(cuts):
        parts.append(end - cut[end])
        end = cut[end]
    return parts[::-1]


def _stretches(parts: Sequence[int]) -> list[Stretch]:
    ends = list(accumulate(parts))
    return list(zip([0, *ends], ends, strict=False))


class _Folded:
    """Two stretches a rank, from the outermost pair to the innermost one.

    What some ranks leave is a stretch in the middle. A first guess keeps, for every beginning of it, only the smallest
    end: nearly always the best, but not always, as each stage needs a layer. Its slowest rank bounds a search that
    remembers what it saw and is exact; the answer of that one bounds another for the evenness.
    """

    def __init__(self, costs: Sequence[int], ranks: int, fits: Fits) -> None:
        self.layers = len(costs)
        self.ranks = ranks
        self.total = [0, *accumulate(costs)]
        self.fits = cache(fits)

    def best(self) -> list[int] | None:
        low, high = 0, self.total[-1]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._guess(middle) else (middle + 1, high)
        found = self._search(high, even=False)
        if found is None:
            return None
        most_even = self._search(found[0], even=True)
        assert most_even is not None, "the same divisions, in another order"
        return most_even[1]

    def _cost(self, begin: int, end: int) -> int:
        return self.total[end] - self.total[begin]

    def _takes(self, rank: int, begin: int, x: int, y: int, end: int, limit: int) -> bool:
        return self._cost(begin, x) + self._cost(y, end) <= limit and self.fits(rank, ((begin, x), (y, end)))

    def _guess(self, limit: int) -> bool:
        """Whether every rank stays within the limit when each leaves as little as it can."""
        left = {0: self.layers}
        for rank in range(self.ranks - 1):
            inner = 2 * (self.ranks - rank - 1)  # layers that the other ranks need at least
            after: dict[int, int] = {}
            for begin, end in left.items():
                for x in range(begin + 1, end - inner):
                    y = next((y for y in range(x + inner, end) if self._takes(rank, begin, x, y, end, limit)), None)
                    if y is None:
                        break  # more on the left leaves less room on the right
                    after[x] = min(after.get(x, self.layers), y)
            left = after
        last = self.ranks - 1
        return any(
            self._takes(last, begin, cut, cut, end, limit)
            for begin, end in left.items()
            for cut in range(begin + 1, end)
        )

    def _search(self, limit: int, even: bool) -> tuple[int, list[int]] | None:
        """The best division in which no rank exceeds the limit, with its value.

        Args:
            even: by the sum of the stages' squares instead of by the slowest rank.
        """

        @cache
        def search(rank: int, begin: int, end: int) -> tuple[int, int, int] | None:
            others = self.ranks - rank - 1
            best: tuple[int, int, int] | None = None
            for x in range(begin + 1, end - 2 * others):
                if self._cost(begin, x) > limit:
                    break
                for y in range(end - 1, x + 2 * others - 1, -1) if others else [x]:
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
                    if best is None or value < best[0]:
                        best = value, x, y
            return best

        outward, returning = [], []
        begin, end = 0, self.layers
        first = None
        for rank in range(self.ranks):
            found = search(rank, begin, end)
            if found is None:
                return None
            value, x, y = found
            first = value if first is None else first
            outward.append(x - begin)
            returning.append(end - y)
            begin, end = x, y
        assert first is not None
        return first, [*outward, *reversed(returning)]

"""How many micro-batches a rank holds at once, against the schedules' own bounds and a simulation."""

from __future__ import annotations

import pytest

from training.schedule.simulation import simulate, under_way
from training.schedule.zero_bubble import LEFT


@pytest.mark.parametrize("ranks", [2, 4])
def test_moments_of_a_filled_schedule(ranks: int) -> None:
    """No rank holds more than the V needs, or lets more passes wait than it may."""
    for rank, moments in enumerate(under_way("dualpipev", ranks, 4 * ranks)):
        assert moments
        for moment in moments:
            whole, waiting = (sum(counts) for counts in zip(*moment, strict=True))
            assert 0 < whole + waiting <= 2 * ranks + 1 + LEFT, rank
            assert waiting <= LEFT + 2


@pytest.mark.parametrize("micro_batches", [1, 3, 20])
def test_micro_batches_under_way_are_those_of_the_schedule(micro_batches: int) -> None:
    ranks = 4
    counts = [0] * ranks
    most = [0] * ranks
    for span in sorted(simulate("1f1b", [1.0] * ranks, [1.0] * ranks, micro_batches).spans, key=lambda s: s.begin):
        counts[span.rank] += 1 if span.kind == "forward" else -1
        most[span.rank] = max(most[span.rank], counts[span.rank])
    assert under_way("1f1b", ranks, micro_batches) == [[((count, 0),)] for count in most]

"""The simulated step: closed forms where theory has them, and properties where it has none."""

from __future__ import annotations

from itertools import pairwise

import pytest

from options.planner.simulation import moments_in_flight, simulate
from training.schedule.instructions import Schedule
from training.schedule.walk import Simulation
from training.schedule.zero_bubble import MAX_DEFERRED

FORWARD, BACKWARD = 1.0, 2.0  # seconds of a whole rank for a micro-batch


def balanced(schedule: Schedule, ranks: int, micro_batches: int, backward: float = BACKWARD) -> Simulation:
    """Ranks that need equally long; with dualpipev each has two halves."""
    stages = 2 * ranks if schedule == "dualpipev" else ranks
    share = ranks / stages
    return simulate(schedule, [FORWARD * share] * stages, [backward * share] * stages, micro_batches)


def busy(simulation: Simulation) -> list[float]:
    """Seconds of work, by rank."""
    spans = simulation.spans
    return [sum(s.end - s.begin for s in spans if s.rank == rank) for rank in range(simulation.ranks)]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 4), (3, 7), (4, 4), (8, 32), (4, 2)])
def test_1f1b_of_equal_stages_takes_m_plus_p_minus_1_turns(ranks: int, micro_batches: int) -> None:
    simulation = balanced("1f1b", ranks, micro_batches)
    assert simulation.seconds == pytest.approx((micro_batches + ranks - 1) * (FORWARD + BACKWARD))
    assert busy(simulation) == pytest.approx([micro_batches * (FORWARD + BACKWARD)] * ranks)
    assert simulation.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_one_stage_never_waits() -> None:
    simulation = simulate("1f1b", [0.3], [0.5], micro_batches=5, transfer=9.0)
    assert simulation.seconds == pytest.approx(4.0)
    assert simulation.bubble == pytest.approx(0.0)


@pytest.mark.parametrize("slowest", [0, 1, 2, 3])
def test_the_slowest_stage_sets_the_speed(slowest: int) -> None:
    """It works without a pause; the others' work shows once, before it begins and after it ended."""
    forward, backward = [1.0] * 4, [2.0] * 4
    forward[slowest], backward[slowest] = 3.0, 6.0
    simulation = simulate("1f1b", forward, backward, micro_batches=40)
    before = sum(forward[:slowest]) + sum(backward[:slowest])
    assert simulation.seconds == pytest.approx(40 * 9.0 + before, rel=0.05)
    assert max(busy(simulation)) == busy(simulation)[slowest] == pytest.approx(360.0)


def test_a_message_delays_the_way_there_and_back() -> None:
    """One micro-batch through three stages: two messages forward, two back."""
    simulation = simulate("1f1b", [1.0] * 3, [2.0] * 3, micro_batches=1, transfer=0.25)
    assert simulation.seconds == pytest.approx(3 * 3.0 + 4 * 0.25)


def test_dualpipev_at_two_ranks_and_four_micro_batches() -> None:
    """By hand: a rank works for 12 s; 1F1B makes it wait for 3 s, DualPipeV, where weights fill its waiting, for 0.5.

    Less is not possible: the second rank begins after the forward pass of the first one's half (0.5).
    """
    plain, dual = balanced("1f1b", 2, 4), balanced("dualpipev", 2, 4)
    assert plain.seconds == pytest.approx(15.0)
    assert busy(dual) == pytest.approx([12.0, 12.0])
    assert dual.seconds == pytest.approx(12.5)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 9), (4, 8), (8, 16), (8, 40)])
def test_dualpipev_waits_less_than_without_its_weights_apart(ranks: int, micro_batches: int) -> None:
    """(PP / 2 - 1)(F&B + B - 3W) for PP stages (github.com/deepseek-ai/DualPipe), at most what it is with W inside B.

    And no rank can begin before the forward passes of those in front of it.
    """
    published = (ranks - 1) * (FORWARD + BACKWARD + BACKWARD) / 2
    found = balanced("dualpipev", ranks, micro_batches).seconds - micro_batches * (FORWARD + BACKWARD)
    assert (ranks - 1) * FORWARD / 2 <= found < published


def test_half_of_a_backward_pass_is_for_the_weights() -> None:
    spans = simulate("dualpipev", [1.0] * 4, [3.0] * 4, micro_batches=4).spans
    assert {(span.kind, span.end - span.begin) for span in spans} == {
        ("forward", 1.0),
        ("backward", 1.5),
        ("weights", 1.5),
    }


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_every_micro_batch_passes_every_stage_in_order(schedule: Schedule) -> None:
    ranks, micro_batches, transfer = 4, 9, 0.1
    stages = 2 * ranks if schedule == "dualpipev" else ranks
    forward, backward = [1.0 + 0.1 * s for s in range(stages)], [2.0 - 0.1 * s for s in range(stages)]
    spans = simulate(schedule, forward, backward, micro_batches, transfer).spans
    for rank in range(ranks):
        mine = [span for span in spans if span.rank == rank]
        assert {span.stage for span in mine} == {rank, 2 * ranks - 1 - rank if schedule == "dualpipev" else rank}
        assert all(first.end <= second.begin for first, second in pairwise(sorted(mine, key=lambda span: span.begin)))
    for micro_batch in range(micro_batches):
        mine = [span for span in spans if span.micro_batch == micro_batch]
        steps = {(span.kind, span.stage): span for span in mine if span.kind != "weights"}
        weights = [span for span in mine if span.kind == "weights"]
        assert sorted(span.stage for span in weights) == (list(range(stages)) if schedule == "dualpipev" else [])
        assert all(span.begin >= steps["backward", span.stage].end for span in weights)
        way = [("forward", s) for s in range(stages)] + [("backward", s) for s in reversed(range(stages))]
        assert set(steps) == set(way)
        for (kind, stage), (next_kind, next_stage) in pairwise(way):
            first, second = steps[kind, stage], steps[next_kind, next_stage]
            assert second.begin >= first.end + (transfer if first.rank != second.rank else 0.0) - 1e-9


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="micro-batches"):
        simulate("dualpipev", [1.0] * 4, [1.0] * 4, micro_batches=3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_dualpipev_keeps_no_more_micro_batches_than_the_v_needs(ranks: int) -> None:
    for rank, moments in enumerate(moments_in_flight("dualpipev", ranks, 4 * ranks)):
        assert moments
        for moment in moments:
            whole, waiting = (sum(counts) for counts in zip(*moment, strict=True))
            assert 0 <= whole + waiting <= 2 * ranks + 1 + MAX_DEFERRED, rank
            assert waiting <= MAX_DEFERRED + 2


@pytest.mark.parametrize("micro_batches", [1, 3, 20])
def test_1f1b_keeps_the_micro_batches_between_their_passes(micro_batches: int) -> None:
    counts, most = [0] * 4, [0] * 4
    for span in sorted(simulate("1f1b", [1.0] * 4, [1.0] * 4, micro_batches).spans, key=lambda span: span.begin):
        counts[span.rank] += 1 if span.kind == "forward" else -1
        most[span.rank] = max(most[span.rank], counts[span.rank])
    assert [max(moments) for moments in moments_in_flight("1f1b", 4, micro_batches)] == [((each, 0),) for each in most]

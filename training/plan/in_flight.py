"""How many micro-batches a rank has begun and not ended, for each of its stages, at the worst moments of a step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from training.schedule.simulation import Schedule, Span, simulate


class Moment(NamedTuple):
    """Micro-batches of each stage that a rank holds: one number a stage, in the order of the rank's stages.

    Attributes:
        whole: whose activations wait for the backward pass, or are in it.
        waiting: whose backward pass is over, but for the gradients of weights (`training.schedule.zero_bubble`).
    """

    whole: tuple[int, ...]
    waiting: tuple[int, ...]


@cache
def under_way(schedule: Schedule, ranks: int, micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """The worst moments of each rank.

    Moments that are worse than another in nothing are left out. The order of a rank's work does not depend on how long
    anything takes, so the simulated step tells; more micro-batches than fill the pipeline change nothing.
    """
    if schedule == "1f1b" or ranks == 1:
        return tuple((Moment((min(micro_batches, ranks - rank),), (0,)),) for rank in range(ranks))
    stages = 2 * ranks
    step = simulate(schedule, [1.0] * stages, [1.0] * stages, min(micro_batches, 4 * ranks))
    return tuple(_worst(_moments(rank, step.spans, (rank, stages - 1 - rank))) for rank in range(ranks))


def _moments(rank: int, spans: Iterable[Span], stages: tuple[int, ...]) -> set[Moment]:
    """All moments of a rank that holds these stages."""
    whole, waiting = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    moments = set()
    for span in sorted((span for span in spans if span.rank == rank), key=lambda span: span.begin):
        if span.kind == "weights":
            waiting[span.stage] -= 1
            continue
        if span.kind == "backward":
            whole[span.stage] -= 1
            waiting[span.stage] += 1
        else:
            whole[span.stage] += 1
        moments.add(Moment(tuple(whole.values()), tuple(waiting.values())))
    return moments


def _worst(moments: set[Moment]) -> tuple[Moment, ...]:
    """Those that no other one is at least as bad as in everything."""

    def covers(other: Moment, moment: Moment) -> bool:
        counts = zip(other.whole + other.waiting, moment.whole + moment.waiting, strict=True)
        return other != moment and all(more >= less for more, less in counts)

    return tuple(sorted(moment for moment in moments if not any(covers(other, moment) for other in moments)))

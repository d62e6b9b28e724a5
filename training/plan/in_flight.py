"""How many micro-batches a rank has begun and not ended, for each of its stages, at the worst moments of a step."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from training.schedule.instructions import Meaning, Schedule
from training.schedule.simulation import program


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
    """The worst moments of each rank; one that another equals or exceeds in every number is left out.

    More micro-batches than fill the pipeline change nothing.
    """
    if schedule == "1f1b" or ranks == 1:
        return tuple((Moment((min(micro_batches, ranks - rank),), (0,)),) for rank in range(ranks))
    moments = [_moments(schedule, rank, ranks, min(micro_batches, 4 * ranks)) for rank in range(ranks)]
    return tuple(
        tuple(sorted(moment for moment in of_rank if not any(_exceeds(other, moment) for other in of_rank)))
        for of_rank in moments
    )


def _moments(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> set[Moment]:
    """All moments of a rank."""
    stages = (rank, 2 * ranks - 1 - rank)
    whole, waiting = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    moments = set()
    for work in program(schedule, rank, ranks, micro_batches):
        if not isinstance(work, Meaning):
            continue
        if work.kind == "forward":
            whole[work.stage] += 1
        elif work.kind == "backward":
            whole[work.stage] -= 1
            waiting[work.stage] += 1
        else:
            waiting[work.stage] -= 1
        moments.add(Moment(tuple(whole.values()), tuple(waiting.values())))
    return moments


def _exceeds(other: Moment, moment: Moment) -> bool:
    counts = zip(other.whole + other.waiting, moment.whole + moment.waiting, strict=True)
    return other != moment and all(more >= less for more, less in counts)

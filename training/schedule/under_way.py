"""For how many micro-batches at once a rank keeps activations, counted along the schedule that the engine runs."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import chain

from training.schedule.instructions import Meaning, Schedule
from training.schedule.simulation import program

# Of each stage of a rank: how many micro-batches have activations there, as their backward pass is not over, and of how
# many only the gradients of weights are to come (`training.schedule.zero_bubble`).
Moment = tuple[tuple[int, int], ...]


@cache
def under_way(schedule: Schedule, ranks: int, micro_batches: int) -> list[list[Moment]]:
    """The worst moments of each rank; one that another equals or exceeds in every number is left out.

    More micro-batches than fill the pipeline change nothing.
    """
    all_moments = [_moments(schedule, rank, ranks, min(micro_batches, 4 * ranks)) for rank in range(ranks)]
    return [[one for one in moments if not any(_exceeds(other, one) for other in moments)] for moments in all_moments]


def _moments(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> set[Moment]:
    """All moments of a rank."""
    stages, complete = ((rank, 2 * ranks - 1 - rank), "weights") if schedule == "dualpipev" else ((rank,), "backward")
    done: Counter[tuple[str, int]] = Counter()
    moments = set()
    for work in program(schedule, rank, ranks, micro_batches):
        if isinstance(work, Meaning):
            done[work.kind, work.stage] += 1
            whole = [done["forward", stage] - done["backward", stage] for stage in stages]
            waiting = [done["backward", stage] - done[complete, stage] for stage in stages]
            moments.add(tuple(zip(whole, waiting, strict=True)))
    return moments


def _exceeds(other: Moment, moment: Moment) -> bool:
    counts = zip(chain(*other), chain(*moment), strict=True)
    return other != moment and all(more >= less for more, less in counts)

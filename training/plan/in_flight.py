"""How many micro-batches a rank has begun and not ended, for each of its stages, at the worst moments of a step."""

from __future__ import annotations

from functools import cache

from training.simulation import Schedule, simulate


@cache
def under_way(schedule: Schedule, ranks: int, micro_batches: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank the counts at its worst moments: one number a stage that it holds, those of others left out.

    Moments that are worse than another in no stage are left out. The order of a rank's work does not depend on how long
    anything takes, so the simulated step tells; more micro-batches than fill the pipeline change nothing.
    """
    chunks = 2 if schedule == "dualpipev" and ranks > 1 else 1
    if chunks == 1:
        return tuple(((min(micro_batches, ranks - rank),),) for rank in range(ranks))
    stages = 2 * ranks
    step = simulate(schedule, [1.0] * stages, [1.0] * stages, min(micro_batches, 4 * ranks))
    found = []
    for rank in range(ranks):
        counts = {rank: 0, stages - 1 - rank: 0}
        moments = set()
        for span in sorted((span for span in step.spans if span.rank == rank), key=lambda span: span.begin):
            counts[span.stage] += {"forward": 1, "backward": 0, "weights": -1}[span.kind]  # which need the activations
            moments.add(tuple(counts.values()))
        found.append(
            tuple(
                sorted(
                    moment
                    for moment in moments
                    if not any(
                        other != moment and all(a >= b for a, b in zip(other, moment, strict=True)) for other in moments
                    )
                )
            )
        )
    return tuple(found)

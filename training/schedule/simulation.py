"""How long a step of the pipeline takes, from what each stage needs for one micro-batch.

The schedules that the engines run (DeepSpeed's 1F1B, `training.schedule.zero_bubble`) are walked through, instruction
by instruction (`training.schedule.walk`): the answer is that of the schedule itself, not of a formula. 1F1B exchanges
one message after the other, DualPipeV starts those that it has queued together and waits for all. What is left out:
loading data, reducing gradients, the optimizer, and whatever ranks that share a machine take from each other.

A step of 16 stages and 64 micro-batches takes some 60 ms to simulate. Importing DeepSpeed takes longer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain

from training.schedule.instructions import WORK, Meaning, Message, Schedule, read_schedule
from training.schedule.walk import Program, Simulation, Step, walk


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float | Sequence[float] = 0.0,
    weights: Sequence[float] | None = None,
) -> Simulation:
    """Walk through one step.

    Args:
        forward, backward: seconds of each stage for one micro-batch, in the order of the layers. 1f1b has one stage a
            rank. dualpipev has two: rank r of P holds stages r and 2P - 1 - r.
        micro_batches: of one replica in a step.
        transfer: seconds of a message between neighbours, once both are there; of all, or of each rank and the next.
        weights: seconds of the weights' gradients, where the schedule computes them by themselves and `backward` does
            not contain them. Half of `backward` where absent, as a matrix product has it.

    Raises:
        ValueError: dualpipev with fewer micro-batches than stages.
    """
    ranks = len(forward) // (2 if schedule == "dualpipev" else 1)
    if weights is None and schedule == "dualpipev":
        backward = weights = [seconds / 2 for seconds in backward]
    programs = [program(schedule, rank, ranks, micro_batches) for rank in range(ranks)]
    transfers = [transfer] * ranks if isinstance(transfer, (int, float)) else transfer
    return walk(programs, {"forward": forward, "backward": backward, "weights": weights or []}, transfers)


def program(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> Program:
    """A rank's work and exchanges in order."""
    for step in _steps(schedule, rank, ranks, micro_batches):  # noqa: UP028
        yield step  # as a list would not take the seconds that a program is sent


@cache
def _steps(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> list[Step]:
    """The same for all divisions and devices, of which a search tries hundreds."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed prints that it found nothing better
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    from training.schedule.zero_bubble import FilledSchedule

    steps: list[Step] = []
    queued: list[Message] = []
    one_by_one = schedule == "1f1b"
    instructions = TrainSchedule if one_by_one else FilledSchedule
    for instruction, meaning in read_schedule(instructions(micro_batches, ranks, rank)):
        if meaning and meaning.kind in WORK:
            steps.append(meaning)
        elif meaning and meaning.message:
            queued.append(meaning.message)
        if queued and (one_by_one or instruction.name in ("LaunchP2P", "CommitP2P")):
            steps.append(queued)
            queued = []
        if one_by_one or instruction.name == "CommitP2P":
            steps.append(None)
    return steps


# Of each stage of a rank: how many micro-batches have activations there, as their backward pass is not over, and of how
# many only the gradients of weights are to come (`training.schedule.zero_bubble`).
Moment = tuple[tuple[int, int], ...]


@cache
def under_way(schedule: Schedule, ranks: int, micro_batches: int) -> list[list[Moment]]:
    """Count the micro-batches whose activations a rank keeps at once, along the schedule: each rank's worst moments.

    A moment that another one equals or exceeds in every number is left out.

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

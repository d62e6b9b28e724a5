"""Simulate a pipeline step, given each stage's seconds for one micro-batch.

The simulator executes the engines' own schedules (DeepSpeed's 1F1B, `options.row_chunks.schedule`,
`training.schedule.zero_bubble`) instruction by instruction (`training.schedule.walk`), so no formula is involved. 1F1B
exchanges one message after the other; DualPipeV starts its queued messages together and waits for all. Not simulated:
loading data, reducing gradients, the optimizer, and contention between ranks of one machine. 16 stages and 64
micro-batches take some 60 ms.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cache

from training.schedule.instructions import WORK, Meaning, Schedule, Transfer, read_schedule
from training.schedule.walk import Program, Simulation, Step, walk


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float | Sequence[float] = 0.0,
    chunks: int = 1,
) -> Simulation:
    """Simulate one step.

    Args:
        forward, backward: seconds of each stage for one micro-batch, or one chunk of its rows, in the order of the
            layers. 1f1b has one stage per rank; dualpipev has two, and half of a backward pass is for the weights, as
            in a matrix product.
        micro_batches: of one replica in a step.
        transfer: seconds of a message once both ranks are ready; one for all, or one for each rank and the next.
        chunks: that the rows of each micro-batch pass in, one after the other (1f1b).

    Raises:
        ValueError: dualpipev with fewer micro-batches than stages.
    """
    ranks, seconds = len(forward), {"forward": forward, "backward": backward}
    if schedule == "dualpipev":
        ranks //= 2
        seconds["backward"] = seconds["weights"] = [each / 2 for each in backward]
    programs = [_program(rank_steps(schedule, rank, ranks, micro_batches, chunks)) for rank in range(ranks)]
    transfers = [transfer] * ranks if isinstance(transfer, (int, float)) else transfer
    return walk(programs, seconds, transfers)


def _program(steps: Sequence[Step]) -> Program:
    for step in steps:  # noqa: UP028
        yield step  # not `yield from`: a list cannot take the seconds that `walk` sends


@cache
def rank_steps(schedule: Schedule, rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> list[Step]:
    """Return a rank's work and exchanges in order; cached, as a search asks for hundreds of stage splits."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed prints a warning that it found no accelerator
    from deepspeed.runtime.pipe.schedule import TrainSchedule  # takes seconds to import

    from options.row_chunks.schedule import ChunkSchedule
    from training.schedule.zero_bubble import FilledSchedule

    steps: list[Step] = []
    queued: list[Transfer] = []
    one_by_one = schedule == "1f1b"
    instructions = TrainSchedule if one_by_one else FilledSchedule
    made = instructions(micro_batches, ranks, rank)
    if chunks > 1:
        made = ChunkSchedule([chunks] * micro_batches, ranks, rank)
    for instruction, meaning in read_schedule(made):
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


# For each stage of a rank: how many micro-batches wait for their backward pass, and how many only for the gradients of
# weights (`training.schedule.zero_bubble`).
Moment = tuple[tuple[int, int], ...]


@cache
def moments_in_flight(schedule: Schedule, ranks: int, micro_batches: int) -> list[list[Moment]]:
    """Count, for each rank, the micro-batches whose activations it keeps at each moment of a step; each count once.

    More micro-batches than fill the pipeline change nothing.
    """
    complete = "weights" if schedule == "dualpipev" else "backward"
    by_rank = []
    for rank in range(ranks):
        stages = (rank, 2 * ranks - 1 - rank) if schedule == "dualpipev" else (rank,)
        done: Counter[tuple[str, int]] = Counter()
        moments: dict[Moment, None] = {}
        for step in rank_steps(schedule, rank, ranks, min(micro_batches, 4 * ranks)):
            if isinstance(step, Meaning):
                done[step.kind, step.stage] += 1
                whole = [done["forward", stage] - done["backward", stage] for stage in stages]
                waiting = [done["backward", stage] - done[complete, stage] for stage in stages]
                moments[tuple(zip(whole, waiting, strict=True))] = None
        by_rank.append(list(moments))
    return by_rank


# Of a rank: tokens whose activations it keeps, micro-batches on their way, and how many of these are going back.
ChunkMoment = tuple[int, int, int]


@cache
def chunks_in_flight(cuts: tuple[int, ...], ranks: int, micro_batches: int) -> list[list[ChunkMoment]]:
    """Count what each rank keeps during each pass of a step whose rows pass in chunks; each moment once.

    Args:
        cuts: tokens of each chunk.
        micro_batches: more than fill the pipeline change nothing.
    """
    number = len(cuts)
    enough = min(micro_batches, 3 + ranks // number)
    by_rank = []
    for rank in range(ranks):
        tokens = 0
        arrived, returned = Counter[int](), Counter[int]()
        moments: dict[ChunkMoment, None] = {}
        for step in rank_steps("1f1b", rank, ranks, enough, number):
            if not isinstance(step, Meaning):
                continue
            assert step.micro_batch is not None
            row, chunk = divmod(step.micro_batch, number)
            if step.kind == "forward":
                tokens += cuts[chunk]
                arrived[row] += 1
            else:
                returned[row] += 1
            moments[tokens, len(arrived), len(returned)] = None
            if step.kind == "backward":
                tokens -= cuts[chunk]
            if returned[row] == number:
                del arrived[row], returned[row]
        by_rank.append(list(moments))
    return by_rank

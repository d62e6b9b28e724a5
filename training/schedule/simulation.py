"""How long a step of the pipeline takes, from what each stage needs for one micro-batch.

The schedules that the engines run (DeepSpeed's 1F1B, `training.schedule.zero_bubble`) are walked through, instruction
by instruction, with one clock a rank: the answer is that of the schedule itself, not of a formula. Computing moves a
rank's clock on. A send waits for its receiver and a receive for its sender, as gloo and NCCL both do; 1F1B does one
after the other, DualPipeV starts those that it has queued together and waits for all. What is left out: loading data,
reducing gradients, the optimizer, and whatever ranks that share a machine take from each other.

A step of 16 stages and 64 micro-batches takes some 60 ms to simulate. Importing DeepSpeed takes longer.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from training.schedule.instructions import WORK, Message, Reading, Schedule


class Span(NamedTuple):
    """A stretch of a rank's time.

    Attributes:
        rank: of the pipeline.
        kind: `forward`, `backward` or `weights`; a measured timeline has more (`training.profiler`).
        micro_batch: from 0; None for what belongs to none.
        begin, end: in seconds from the beginning of the step.
        stage: which part of the layers, in their order; with dualpipev a rank holds two.
    """

    rank: int
    kind: str
    micro_batch: int | None
    begin: float
    end: float
    stage: int


@dataclass(frozen=True)
class Simulation:
    """One simulated step, without its optimizer.

    Attributes:
        seconds: from the first instruction of any rank to the last one.
        spans: the work of all ranks.
        ranks: of the pipeline.
    """

    seconds: float
    spans: tuple[Span, ...]
    ranks: int

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work, by rank."""
        seconds = [0.0] * self.ranks
        for span in self.spans:
            seconds[span.rank] += span.end - span.begin
        return tuple(seconds)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which nothing is computed."""
        return 1 - sum(self.busy) / (self.ranks * self.seconds)


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float = 0.0,
    weights: Sequence[float] | None = None,
) -> Simulation:
    """Walk through one step.

    Args:
        forward, backward: seconds of each stage for one micro-batch, in the order of the layers. 1f1b has one stage a
            rank. dualpipev has two: rank r of P holds stages r and 2P - 1 - r.
        micro_batches: of one replica in a step.
        transfer: seconds of a message between neighbours, once both are there.
        weights: seconds of the weights' gradients, where the schedule computes them by themselves and `backward` does
            not contain them. Half of `backward` where absent, as a matrix product has it.

    Raises:
        ValueError: dualpipev with an odd number of stages, or with fewer micro-batches than stages.
    """
    if len(forward) != len(backward):
        raise ValueError(f"{len(forward)} stages forward, but {len(backward)} backward")
    if schedule == "dualpipev" and len(forward) % 2:
        raise ValueError(f"dualpipev has two stages a rank, but there are {len(forward)}")
    ranks = len(forward) // (2 if schedule == "dualpipev" else 1)
    if weights is None and schedule == "dualpipev":
        backward = weights = [seconds / 2 for seconds in backward]
    seconds = {"forward": forward, "backward": backward, "weights": weights or []}
    posted: dict[tuple[Message, int], float] = {}
    spans: list[Span] = []
    walks = [
        _walk(rank, _program(schedule, rank, ranks, micro_batches), seconds, transfer, posted, spans)
        for rank in range(ranks)
    ]
    ends: list[float] = []
    while walks:
        waiting = []
        for walk in walks:
            try:
                next(walk)
                waiting.append(walk)
            except StopIteration as stop:
                ends.append(stop.value)
        walks = waiting
    return Simulation(seconds=max(ends), spans=tuple(spans), ranks=ranks)


class _Work(NamedTuple):
    kind: str
    stage: int
    micro_batch: int | None


class _Launch(NamedTuple):
    """Messages that are under way from here on, and waited for later."""

    messages: tuple[Message, ...]


_Step = _Work | _Launch | list[Message]


def _program(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> Iterator[_Step]:
    """A rank's work and exchanges in order; the messages of one exchange are under way together."""
    read = Reading(rank, ranks)
    queued: list[Message] = []
    for instruction in _instructions(schedule, rank, ranks, micro_batches):
        meaning = read(instruction.name, getattr(instruction, "phase", 0))
        if meaning and meaning.kind in WORK:
            yield _Work(meaning.kind, meaning.stage, meaning.micro_batch)
        elif meaning and meaning.message:
            queued.append(meaning.message)
        elif instruction.name == "LaunchP2P":
            yield _Launch(tuple(queued))
        if queued and (schedule == "1f1b" or instruction.name == "CommitP2P"):
            yield queued
            queued = []


def _instructions(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> Iterable[Any]:
    steps = _schedules()[schedule](micro_batches, ranks, rank).steps()
    return (instruction for step in steps for instruction in step)


@cache
def _schedules() -> dict[Schedule, Any]:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed prints that it found nothing better
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    from training.schedule.zero_bubble import FilledSchedule

    return {"1f1b": TrainSchedule, "dualpipev": FilledSchedule}


def _walk(
    rank: int,
    program: Iterable[_Step],
    seconds: Mapping[str, Sequence[float]],
    transfer: float,
    posted: dict[tuple[Message, int], float],
    spans: list[Span],
) -> Generator[None, None, float]:
    """Move one rank on until it waits for another; returns when it was done.

    Args:
        posted: when each rank came to each message, shared by all ranks.
        spans: where the work is noted, shared too.
    """
    clock = 0.0
    for step in program:
        if isinstance(step, _Work):
            end = clock + seconds[step.kind][step.stage]
            spans.append(Span(rank, step.kind, step.micro_batch, clock, end, step.stage))
            clock = end
            continue
        if isinstance(step, _Launch):
            posted |= {(message, rank): clock for message in step.messages}
            continue
        for message in step:
            posted.setdefault((message, rank), clock)
        others = [(message, peer) for message in step for peer in message.ends - {rank}]
        while any(other not in posted for other in others):
            yield
        started = max(max(posted[message, peer], posted[message, rank]) for message, peer in others)
        clock = max(clock, started + transfer)
    return clock

"""Ranks that work and wait for each other, with one clock each.

Computing moves a rank's clock on. A send waits for its receiver and a receive for its sender, as gloo and NCCL both do;
the messages of one exchange are under way together.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from training.schedule.instructions import Meaning, Message


class Span(NamedTuple):
    """What a rank does for a while.

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


# What a rank does: work; messages that start now, answered by the seconds until all are there; None waits for those.
Program = Generator[Meaning | list[Message] | None, float | None, None]


def walk(
    programs: Sequence[Program], seconds: Mapping[str, Sequence[float]], transfer: float = 0.0
) -> tuple[float, list[Span]]:
    """Let all ranks run their programs; when the last is done, and all work.

    Args:
        seconds: of each kind of work, by stage.
        transfer: seconds of a message, once both ends are there.
    """
    posted: dict[tuple[Message, int], float] = {}  # when each rank came to each message
    spans: list[Span] = []
    ends: list[float] = []

    def run(rank: int, program: Program) -> Generator[None, None, None]:
        clock = arrival = 0.0
        answer: float | None = None
        while True:
            try:
                step = program.send(answer)
            except StopIteration:
                ends.append(clock)
                return
            answer = None
            if isinstance(step, Meaning):
                length = seconds[step.kind][step.stage]
                spans.append(Span(rank, step.kind, step.micro_batch, clock, clock + length, step.stage))
                clock = spans[-1].end
            elif step is None:
                clock = max(clock, arrival)
            else:
                posted.update({(message, rank): clock for message in step})
                others = [(message, peer) for message in step for peer in message.ends - {rank}]
                while any(other not in posted for other in others):
                    yield
                arrival = max(clock, *(posted[other] for other in others)) + transfer
                answer = arrival - clock

    waiting = [run(rank, program) for rank, program in enumerate(programs)]
    while waiting:
        waiting = [each for each in waiting if next(each, "done") != "done"]
    return max(ends), spans

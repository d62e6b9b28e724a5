"""Simulate ranks that work and wait for each other, with one clock each.

Work advances a rank's clock. A send waits for its receiver and a receive for its sender, like in gloo and NCCL; the
messages of one exchange travel together.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from training.schedule.instructions import Meaning, Transfer


class TimeSpan(NamedTuple):
    """An interval in which a rank does one thing.

    Attributes:
        kind: `forward`, `backward` or `weights`; a measured timeline has more.
        micro_batch: from 0; None if the work belongs to none.
        begin, end: in seconds.
        stage: in the order of the layers; with dualpipev a rank holds two.
    """

    rank: int
    kind: str
    micro_batch: int | None
    begin: float
    end: float
    stage: int


@dataclass(frozen=True)
class Simulation:
    """One step without its optimizer: its duration, and the work of all ranks."""

    seconds: float
    spans: tuple[TimeSpan, ...]
    ranks: int

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which nothing is computed."""
        return 1 - sum(span.end - span.begin for span in self.spans) / (self.ranks * self.seconds)


# One step of a rank: work; messages to start, answered by the seconds until all have arrived; None waits for them.
Step = Meaning | list[Transfer] | None
Program = Generator[Step, float | None, None]


def walk(
    programs: Sequence[Program], seconds: Mapping[str, Sequence[float]], transfers: Sequence[float] = ()
) -> Simulation:
    """Run the programs of all ranks to their end.

    Args:
        seconds: kind of work -> seconds by stage.
        transfers: seconds of a message between each rank and the next, once both are ready; 0 by default.
    """
    posted: dict[tuple[Transfer, int], float] = {}  # when each rank was ready for each message
    spans: list[TimeSpan] = []
    ends: list[float] = []

    def run(rank: int, program: Program) -> Generator[None, None, None]:
        clock = arrival = 0.0
        idle: float | None = None
        with suppress(StopIteration):
            while True:
                step, idle = program.send(idle), None
                if isinstance(step, Meaning):
                    end = clock + seconds[step.kind][step.stage]
                    spans.append(TimeSpan(rank, step.kind, step.micro_batch, clock, end, step.stage))
                    clock = end
                elif step is None:
                    clock = max(clock, arrival)
                else:
                    posted.update({(message, rank): clock for message in step})
                    others = []
                    for message in step:
                        others += [(message, peer) for peer in message.ends - {rank}]
                    while any(other not in posted for other in others):
                        yield
                    taken = max(transfers[min(message.ends)] for message in step) if transfers else 0.0
                    arrival = max(clock, *(posted[other] for other in others)) + taken
                    idle = arrival - clock
        ends.append(clock)

    waiting = [run(rank, program) for rank, program in enumerate(programs)]
    while waiting:
        waiting = [each for each in waiting if next(each, "done") != "done"]
    return Simulation(max(ends), tuple(spans), len(programs))

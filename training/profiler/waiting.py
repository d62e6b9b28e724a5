"""Tells work from waiting, once the spans of all ranks lie side by side.

A message moves when both its ends are there. So a rank that came first waited until the other came, and only the rest
of its send or receive is the transfer. What no span covers is idle too. Every rank's row then covers the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from training.profiler.recorder import Record
from training.schedule.simulation import Span

SHORTEST = 1e-5  # seconds; shorter gaps are the engine going from one instruction to the next


class Seat(NamedTuple):
    """Where a process stands: which rank of the pipeline, and in which replica of it."""

    stage: int
    replica: int


def with_idle(records: Sequence[Sequence[Record]], seats: Sequence[Seat]) -> list[list[Span]]:
    """The spans of one step on all ranks, with `idle` ones where a rank waited.

    Args:
        records: of the step by rank, in common time.
        seats: by rank.

    Returns:
        The spans by rank, in order.
    """
    posted = {
        (seat.replica, seat.stage, message): record.posted
        for seat, row in zip(seats, records, strict=True)
        for record in row
        for message in record.messages
    }
    begin = min(record.span.begin for row in records for record in row)
    end = max(record.span.end for row in records for record in row)
    filled: list[list[Span]] = []
    for rank, (seat, row) in enumerate(zip(seats, records, strict=True)):
        spans: list[Span] = []
        last = begin
        for span, messages, _ in row:
            others = [(seat.replica, stage, message) for message in messages for stage in message.ends - {seat.stage}]
            moving = max([span.begin, *(posted[other] for other in others if other in posted)])
            moving = min(moving, span.end)  # clocks may differ a little
            if moving - last >= SHORTEST:
                spans.append(Span(rank, "idle", None, last, moving, seat.stage))
            spans.append(span._replace(begin=moving))
            last = span.end
        if end - last >= SHORTEST:
            spans.append(Span(rank, "idle", None, last, end, seat.stage))
        filled.append(spans)
    return filled

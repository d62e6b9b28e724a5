"""Tells work from waiting, once the spans of all ranks lie side by side.

A message moves when both its ends are there. So a rank that came first waited until the other came, and only the rest
of its send or receive is the transfer. What no span covers is idle too. Every rank's row then covers the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from training.profiler.recorder import Record
from training.schedule.instructions import Message
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
    came: dict[tuple[int, int, Message], float] = {}
    for seat, rows in zip(seats, records, strict=True):
        for _, messages, posted in rows:
            came |= {(seat.replica, seat.stage, message): posted for message in messages}
    begin = min(record.span.begin for rows in records for record in rows)
    end = max(record.span.end for rows in records for record in rows)
    filled = []
    for rank, (seat, rows) in enumerate(zip(seats, records, strict=True)):
        busy = [_moving(record.span, record.messages, seat, came) for record in rows]
        filled.append(_fill(busy, rank, seat.stage, begin, end))
    return filled


def _moving(
    span: Span, messages: Sequence[Message], seat: Seat, came: Mapping[tuple[int, int, Message], float]
) -> Span:
    """The span from when the other ends of its messages were there."""
    others = [(seat.replica, stage, message) for message in messages for stage in message.ends - {seat.stage}]
    ready = max((came[other] for other in others if other in came), default=span.begin)
    return span._replace(begin=min(max(span.begin, ready), span.end))


def _fill(busy: Sequence[Span], rank: int, stage: int, begin: float, end: float) -> list[Span]:
    filled: list[Span] = []
    last = begin
    for span in [*busy, None]:
        until = span.begin if span else end
        if until - last >= SHORTEST:
            filled.append(Span(rank, "idle", None, last, until, stage))
        if span:
            filled.append(span)
            last = span.end
    return filled

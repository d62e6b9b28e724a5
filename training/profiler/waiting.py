"""Tells work from waiting, once the spans of all ranks lie side by side.

A message moves when both its ends are there. So a rank that came first waited until the other came, and only the rest
of its send or receive is the transfer. What no span covers is idle too. Every rank's row then covers the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.profiler.recorder import Record
from training.schedule.walk import Span

SHORTEST = 1e-5  # seconds; shorter gaps are the engine going from one instruction to the next


def with_idle(records: Sequence[Sequence[Record]], stages: Sequence[int]) -> list[list[Span]]:
    """The spans of one step on all ranks, with `idle` ones where a rank waited.

    Args:
        records: of the step by rank, in common time.
        stages: of the pipeline, by rank; where several ranks have the same one, each belongs to another replica.

    Returns:
        The spans by rank, in order.
    """
    replicas = [stages[:rank].count(stage) for rank, stage in enumerate(stages)]
    posted = {
        (replica, stage, message): record.posted
        for replica, stage, row in zip(replicas, stages, records, strict=True)
        for record in row
        for message in record.messages
    }
    begin = min(record.span.begin for row in records for record in row)
    end = max(record.span.end for row in records for record in row)
    filled: list[list[Span]] = []
    for rank, (replica, stage, row) in enumerate(zip(replicas, stages, records, strict=True)):
        spans: list[Span] = []
        last = begin
        for span, messages, _ in row:
            others = [(replica, other, message) for message in messages for other in message.ends - {stage}]
            moving = max([span.begin, *(posted.get(each, begin) for each in others)])
            moving = min(moving, span.end)  # clocks may differ a little
            if moving - last >= SHORTEST:
                spans.append(Span(rank, "idle", None, last, moving, stage))
            spans.append(span._replace(begin=moving))
            last = span.end
        if end - last >= SHORTEST:
            spans.append(Span(rank, "idle", None, last, end, stage))
        filled.append(spans)
    return filled

"""Separate waiting from work in recorded steps; compute the bubble and the times of each stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from training.profiler.recorder import Record
from training.schedule.instructions import WORK
from training.schedule.walk import Span

SHORTEST = 1e-5  # seconds; shorter gaps are the engine's own time between instructions


@dataclass(frozen=True)
class Figures:
    """Means over the recorded steps.

    Attributes:
        seconds: of a step without its optimizer.
        bubble: share of the ranks' time in which nothing is computed.
        passes: kind -> seconds of each stage for one micro-batch; `weights` only where they are computed separately.
    """

    seconds: float
    bubble: float
    passes: dict[str, list[float]]

    @classmethod
    def from_spans(cls, steps: Iterable[Sequence[Sequence[Span]]]) -> Figures:
        """Average over spans by step and process."""
        times: dict[str, dict[int, list[float]]] = {}
        seconds: list[float] = []
        available = worked = 0.0
        for rows in steps:
            spans = [span for row in rows for span in row if span.kind not in ("idle", "optimizer")]
            seconds.append(max(span.end for span in spans) - min(span.begin for span in spans))
            available += len(rows) * seconds[-1]
            for span in spans:
                if span.kind in WORK:
                    times.setdefault(span.kind, defaultdict(list))[span.stage].append(span.end - span.begin)
                    worked += span.end - span.begin
        passes = {kind: [mean(stages[stage]) for stage in sorted(stages)] for kind, stages in times.items()}
        return cls(mean(seconds), 1 - worked / available, passes)

    def by_rank(self, ranks: int) -> list[float]:
        """Return the seconds of all passes of each rank for one micro-batch."""
        stages = [sum(seconds) for seconds in zip(*self.passes.values(), strict=True)]
        return stages if len(stages) == ranks else [stages[rank] + stages[-1 - rank] for rank in range(ranks)]


def add_idle_spans(records: Sequence[Sequence[Record]], stages: Sequence[int]) -> list[list[Span]]:
    """Return the spans of one step by rank, with `idle` spans wherever a rank waited.

    A message moves when both ranks are ready. The rank that was ready first waits for the other, and only the rest of
    its send or receive is the transfer. Time without any span is idle too, so the spans cover the step.

    Args:
        records: of the step by rank, in common time.
        stages: by rank; ranks with the same stage belong to different replicas.
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

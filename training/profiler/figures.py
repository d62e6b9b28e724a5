"""What recorded steps say: the bubble, each stage's times and the slowest stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from training.profiler.recorder import Record
from training.schedule.instructions import WORK, Schedule
from training.schedule.walk import Span


@dataclass(frozen=True)
class Figures:
    """Means over the recorded steps.

    Attributes:
        seconds: of a step without its optimizer.
        bubble: the share of that in which a rank runs no pass, neither forward nor backward.
        passes: seconds of each stage for one micro-batch by kind: `forward`, `backward`, and `weights` where the
            weights' gradients have passes of their own; with dualpipev a rank has two stages.
        transfer: seconds of a message, without the waiting for its other end.
        ranks: of the pipeline.
    """

    seconds: float
    bubble: float
    passes: dict[str, list[float]]
    transfer: float
    ranks: int

    @classmethod
    def of(cls, steps: Iterable[Sequence[Sequence[Span]]], ranks: int) -> Figures:
        """Of the spans by step and rank; a pipeline with replicas has more processes than ranks."""
        times: dict[str, dict[int, list[float]]] = {}
        transfers: list[float] = []
        seconds: list[float] = []
        available = worked = 0.0
        for rows in steps:
            spans = [span for row in rows for span in row if span.kind not in ("idle", "optimizer")]
            seconds.append(max(span.end for span in spans) - min(span.begin for span in spans))
            available += len(rows) * seconds[-1]
            for span in spans:
                if span.kind in WORK:
                    times.setdefault(span.kind, {}).setdefault(span.stage, []).append(span.end - span.begin)
                    worked += span.end - span.begin
                elif span.kind != "data":
                    transfers.append(span.end - span.begin)
        return cls(
            seconds=mean(seconds),
            bubble=1 - worked / available,
            passes={kind: [mean(stages[stage]) for stage in sorted(stages)] for kind, stages in times.items()},
            transfer=mean(transfers or [0.0]),
            ranks=ranks,
        )

    @property
    def schedule(self) -> Schedule:
        return "dualpipev" if len(self.passes["forward"]) == 2 * self.ranks else "1f1b"

    @property
    def by_rank(self) -> list[float]:
        """Seconds of a rank for one micro-batch, all passes."""
        stages = [sum(seconds) for seconds in zip(*self.passes.values(), strict=True)]
        return [stages[rank] + (stages[-1 - rank] if self.schedule == "dualpipev" else 0) for rank in range(self.ranks)]


SHORTEST = 1e-5  # seconds; shorter gaps are the engine going from one instruction to the next


def with_idle(records: Sequence[Sequence[Record]], stages: Sequence[int]) -> list[list[Span]]:
    """Tell work from waiting: the spans of one step on all ranks, with `idle` ones where a rank waited.

    A message moves when both its ends are there. So a rank that came first waited until the other came, and only the
    rest of its send or receive is the transfer. What no span covers is idle too, so the spans cover the step.

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

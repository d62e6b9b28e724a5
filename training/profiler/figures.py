"""What recorded steps say: the bubble, each stage's times and the slowest stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

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

"""What recorded steps say: the bubble, each stage's times, the slowest stage, and which `parts` would be better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from training.plan.partition import best_split, layer_ranges
from training.schedule.instructions import WORK, Schedule
from training.schedule.simulation import simulate
from training.schedule.walk import Simulation, Span

SMALLEST_GAIN = 1.02  # a gain that is less may be the measurement's own error
TICKS = 10**6  # a split counts in whole microseconds


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

    def simulated(self, micro_batches: int) -> Simulation:
        """The step that the schedule makes of these times."""
        forward, backward, weights = self.passes["forward"], self.passes["backward"], self.passes.get("weights")
        return simulate(self.schedule, forward, backward, micro_batches, self.transfer, weights)

    def better_parts(
        self, parts: Sequence[int], layer_costs: Sequence[float], micro_batches: int
    ) -> tuple[list[int], float] | None:
        """Layers per stage that would make the step faster, and how many times as fast.

        Each stage's measured time is spread over its layers by their costs, and the layers are divided anew.

        Args:
            parts: layers of each stage in the recorded steps.
            layer_costs: of each layer, in any unit; only their ratio inside a stage counts.

        Returns:
            None where the gain, by simulation, is too small to be sure of.
        """
        layers = {kind: _by_layer(seconds, parts, layer_costs) for kind, seconds in self.passes.items()}
        ticks = [round(sum(seconds) * TICKS) for seconds in zip(*layers.values(), strict=True)]
        split = best_split(ticks, self.ranks, lambda *_: True, self.schedule == "dualpipev")
        assert split is not None  # the parts that were recorded are one
        by_stage = {kind: [sum(seconds[b:e]) for b, e in layer_ranges(split)] for kind, seconds in layers.items()}
        gain = self.simulated(micro_batches).seconds / replace(self, passes=by_stage).simulated(micro_batches).seconds
        return (split, gain) if gain > SMALLEST_GAIN else None


def _by_layer(stage_seconds: Sequence[float], parts: Sequence[int], layer_costs: Sequence[float]) -> list[float]:
    """Seconds of each layer; those of a stage without costs are shared equally."""
    by_layer: list[float] = []
    for seconds, (begin, end) in zip(stage_seconds, layer_ranges(parts), strict=True):
        costs = layer_costs[begin:end] if sum(layer_costs[begin:end]) else [1.0] * (end - begin)
        by_layer += [seconds * cost / sum(costs) for cost in costs]
    return by_layer

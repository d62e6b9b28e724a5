"""What recorded steps say: the bubble, each stage's times, the slowest stage, and which `parts` would be better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from training.plan.partition import best_split
from training.schedule.instructions import WORK, Schedule
from training.schedule.simulation import Simulation, Span, simulate

WORTH_TELLING = 1.02  # a gain that is less may be the measurement's own error
TICKS = 10**6  # a split counts in whole microseconds


@dataclass(frozen=True)
class Figures:
    """Means over the recorded steps.

    Attributes:
        seconds: of a step without its optimizer.
        bubble: the share of that in which a rank runs no pass, neither forward nor backward.
        forward, backward: seconds of each stage for one micro-batch; with dualpipev a rank has two stages.
        weights: seconds of the weights' gradients, where they have passes of their own; else empty.
        transfer: seconds of a message, without the waiting for its other end.
        ranks: of the pipeline.
    """

    seconds: float
    bubble: float
    forward: list[float]
    backward: list[float]
    weights: list[float]
    transfer: float
    ranks: int

    @classmethod
    def of(cls, steps: Iterable[Sequence[Sequence[Span]]], ranks: int) -> Figures:
        """Of the spans by step and rank; a pipeline with replicas has more processes than ranks."""
        times: dict[tuple[str, int], list[float]] = {}
        transfers: list[float] = []
        seconds: list[float] = []
        available = 0.0
        for rows in steps:
            spans = [span for row in rows for span in row if span.kind not in ("idle", "optimizer")]
            seconds.append(max(span.end for span in spans) - min(span.begin for span in spans))
            available += len(rows) * seconds[-1]
            for span in spans:
                if span.kind in WORK:
                    times.setdefault((span.kind, span.stage), []).append(span.end - span.begin)
                elif span.kind != "data":
                    transfers.append(span.end - span.begin)
        stages = sorted({stage for _, stage in times})
        means = {key: sum(values) / len(values) for key, values in times.items()}
        return cls(
            seconds=sum(seconds) / len(seconds),
            bubble=1 - sum(map(sum, times.values())) / available,
            forward=[means["forward", stage] for stage in stages],
            backward=[means["backward", stage] for stage in stages],
            weights=[means["weights", stage] for stage in stages if ("weights", stage) in means],
            transfer=sum(transfers) / max(len(transfers), 1),
            ranks=ranks,
        )

    @property
    def schedule(self) -> Schedule:
        return "dualpipev" if len(self.forward) == 2 * self.ranks else "1f1b"

    @property
    def by_rank(self) -> list[float]:
        """Seconds of a rank for one micro-batch, all passes."""
        passes = [self.forward, self.backward] + ([self.weights] if self.weights else [])
        stages = [sum(seconds) for seconds in zip(*passes, strict=True)]
        return [stages[rank] + (stages[-1 - rank] if self.schedule == "dualpipev" else 0) for rank in range(self.ranks)]

    def simulated(self, micro_batches: int) -> Simulation:
        """The step that the schedule makes of these times."""
        return simulate(self.schedule, self.forward, self.backward, micro_batches, self.transfer, self.weights or None)

    def better_parts(
        self, parts: Sequence[int], layer_costs: Sequence[float], micro_batches: int
    ) -> tuple[list[int], float] | None:
        """Layers per stage that would make the step faster, and how many times as fast.

        Each stage's measured time is spread over its layers by their costs, and the layers are divided anew.

        Args:
            parts: layers of each stage in the recorded steps.
            layer_costs: of each layer, in any unit; only their ratio inside a stage counts.

        Returns:
            None where the gain, by simulation, is not worth telling.
        """
        passes = [self.forward, self.backward] + ([self.weights] if self.weights else [])
        by_layer = [_spread(stage_seconds, parts, layer_costs) for stage_seconds in passes]
        costs = [round(sum(seconds) * TICKS) for seconds in zip(*by_layer, strict=True)]
        split = best_split(costs, self.ranks, lambda *_: True, folded=self.schedule == "dualpipev")
        if split is None:
            return None
        forward, backward, *weights = (_joined(seconds, split) for seconds in by_layer)
        simulation = simulate(self.schedule, forward, backward, micro_batches, self.transfer, *weights)
        gain = self.simulated(micro_batches).seconds / simulation.seconds
        return (split, gain) if gain > WORTH_TELLING else None


def _spread(stage_seconds: Sequence[float], parts: Sequence[int], layer_costs: Sequence[float]) -> list[float]:
    """Seconds of each layer."""
    seconds: list[float] = []
    for stage, (begin, end) in enumerate(pairwise([0, *accumulate(parts)])):
        total = sum(layer_costs[begin:end])
        shares = [cost / total if total else 1 / (end - begin) for cost in layer_costs[begin:end]]
        seconds += [stage_seconds[stage] * share for share in shares]
    return seconds


def _joined(layer_seconds: Sequence[float], parts: Sequence[int]) -> list[float]:
    """Seconds of each stage."""
    return [sum(layer_seconds[begin:end]) for begin, end in pairwise([0, *accumulate(parts)])]

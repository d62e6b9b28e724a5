"""Record the steps of `profile_steps`, separate waiting from work, and report on them after the last one.

Rank 0 gathers the spans of all ranks, writes timeline.json and timeline.png into the run's folder and logs the bubble.
Clocks differ between machines, so the ranks compare them once before the first recorded step. Cost: 20 ms for the
clocks and, after the last recorded step, about two seconds for the files.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

import torch

from common.quantities import duration
from common.whole_files import replace_text
from options.planner.partition import held_layers
from options.timeline.drawing import draw_timeline, trace
from options.timeline.recorder import Record, Recorder
from training.callbacks import Callback
from training.distributed.processes import gather
from training.schedule.instructions import WORK, Transfer
from training.schedule.walk import TimeSpan

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics

TRACE_FILE, CHART_FILE = "timeline.json", "timeline.png"
ROUNDS = 9  # barriers to compare clocks with
SHORTEST = 1e-5  # seconds; shorter gaps are the engine's own time between instructions


class ProfiledSteps(Callback):
    """Record the steps of `profile_steps` and draw their timeline."""

    def __init__(self, steps: tuple[int, int]) -> None:
        self._steps = steps
        self._recorder: Recorder | None = None
        self._records: dict[int, list[Record]] = {}  # by step, until they are reported

    @contextmanager
    def around_step(self, run: Run, step: int, batch: GlobalBatch) -> Iterator[None]:
        if not self._steps[0] <= step <= self._steps[1]:
            yield
            return
        engine = run.trainer.engine
        if self._recorder is None:
            self._recorder = Recorder(torch.distributed.get_rank(), engine.device, _clock_offset())
        with self._recorder.step(engine) as self._records[step]:
            yield

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        if metrics.step == self._steps[1]:
            self._finish(run)

    def on_end(self, run: Run, step: int) -> None:
        if self._recorder is None:
            run.progress.log.print(f"timeline: none; this run had no step from {self._steps[0]} to {self._steps[1]}")
        elif self._records:
            self._finish(run)

    def _finish(self, run: Run) -> None:
        """Gather the records on rank 0 and report them."""
        stages = gather(run.trainer.stage)
        gathered = [self._records] * len(stages) if torch.distributed.get_rank() == 0 else None
        torch.distributed.gather_object(self._records, gathered)
        if gathered:
            spans = {}
            for step in self._records:
                spans[step] = add_idle_spans([records[step] for records in gathered], stages)
            assert self._recorder
            _report(run, stages, spans, self._recorder.unit)
        self._records = {}


def _report(run: Run, stages: Sequence[int], spans: dict[int, list[list[TimeSpan]]], unit: str) -> None:
    """Log the figures, and write the files.

    Args:
        stages: by rank.
        spans: by step and rank.
        unit: what passes through the stages at once, in a word.
    """
    folder, log = Path(run.config.save_path), run.progress.log
    first, last = min(spans), max(spans)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    figures = Figures.from_spans(spans.values()).describe(max(stages) + 1, unit)
    log.print(f"timeline of {steps}: {figures}")
    names = [f"rank {rank}" for rank in range(len(stages))]
    if run.topology.parts and not run.config.weights_on_host:
        held = held_layers(run.topology.parts, max(stages) + 1)
        for rank, stage in enumerate(stages):
            layers = " and ".join(f"{begin}-{end - 1}" for begin, end in held[stage])
            names[rank] += f": stage {stage}, layers {layers}"
    try:
        replace_text(folder / TRACE_FILE, json.dumps(trace(spans, names)))
        draw_timeline(spans[last], names, describe_drawn(last, spans[last], steps, figures), folder / CHART_FILE)
    except OSError as error:
        log.print(f"warning: the timeline cannot be written: {error}")
    else:
        log.print(f"timeline: {folder / TRACE_FILE} (for ui.perfetto.dev), {folder / CHART_FILE}")


def describe_drawn(step: int, rows: Sequence[Sequence[TimeSpan]], steps: str, figures: str) -> str:
    """Say what a picture shows, and of what its figures are.

    Args:
        rows: spans of the drawn step by rank.
        steps: that were recorded, in words.
        figures: see `Figures.describe`.
    """
    spans = list(chain.from_iterable(rows))
    seconds = max(span.end for span in spans) - min(span.begin for span in spans)
    optimizer = "with" if any(span.kind == "optimizer" for span in spans) else "without"
    measured = steps if steps == f"step {step}" else f"mean of {steps}"
    drawn = f"step {step}: {duration(seconds)} {optimizer} the optimizer"
    return f"{drawn}\n{measured} without the optimizer: {figures}"


def _clock_offset() -> float:
    """Measure by how many seconds this process's `time.perf_counter` is ahead of rank 0's.

    All ranks leave a barrier at about the same moment; the median over several is exact to a tenth of a millisecond.
    """
    left = []
    for _ in range(ROUNDS):
        torch.distributed.barrier()
        left.append(time.perf_counter())
    return median(mine - theirs for mine, theirs in zip(left, gather(left)[0], strict=True))


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
    def from_spans(cls, steps: Iterable[Sequence[Sequence[TimeSpan]]]) -> Figures:
        """Average over spans by step and process."""
        times: dict[str, dict[int, list[float]]] = {}
        seconds: list[float] = []
        available = worked = 0.0
        for rows in steps:
            spans = [span for span in chain.from_iterable(rows) if span.kind not in ("idle", "optimizer")]
            seconds.append(max(span.end for span in spans) - min(span.begin for span in spans))
            available += len(rows) * seconds[-1]
            for span in spans:
                if span.kind in WORK:
                    times.setdefault(span.kind, defaultdict(list))[span.stage].append(span.end - span.begin)
                    worked += span.end - span.begin
        passes = {}
        for kind, stages in times.items():
            passes[kind] = [mean(stages[stage]) for stage in sorted(stages)]
        return cls(mean(seconds), 1 - worked / available, passes)

    def by_rank(self, ranks: int) -> list[float]:
        """Return the seconds of all passes of each rank for one micro-batch, or what passes in its place."""
        stages = [sum(seconds) for seconds in zip(*self.passes.values(), strict=True)]
        return stages if len(stages) == ranks else [stages[rank] + stages[-1 - rank] for rank in range(ranks)]

    def describe(self, ranks: int, unit: str = "micro-batch") -> str:
        """Describe the bubble and, in a pipeline, the slowest stage."""
        bubble = f"bubble {self.bubble:.1%} of {duration(self.seconds)}"
        if ranks == 1 or "head" in self.passes:  # turns, which any rank may have
            return bubble
        by_rank = self.by_rank(ranks)
        slowest = max(by_rank)
        stage = f"stage {by_rank.index(slowest)} is the slowest, {duration(slowest)} a {unit}"
        return f"{bubble}; {stage}, {slowest * ranks / sum(by_rank) - 1:.1%} above the mean"


def add_idle_spans(records: Sequence[Sequence[Record]], stages: Sequence[int]) -> list[list[TimeSpan]]:
    """Return the spans of one step by rank, with `idle` spans wherever a rank waited.

    A message moves when both ranks are ready. The rank that was ready first waits for the other, and only the rest of
    its send or receive is the transfer. Time without any span is idle too, so the spans cover the step.

    Args:
        records: of the step by rank, in common time.
        stages: by rank; ranks with the same stage belong to different replicas.
    """
    replicas = [stages[:rank].count(stage) for rank, stage in enumerate(stages)]
    posted: dict[tuple[int, int, Transfer], float] = {}
    for replica, stage, row in zip(replicas, stages, records, strict=True):
        for record in row:
            posted |= {(replica, stage, message): record.posted for message in record.messages}
    every_span = [record.span for record in chain.from_iterable(records)]
    begin = min(span.begin for span in every_span)
    end = max(span.end for span in every_span)
    filled: list[list[TimeSpan]] = []
    for rank, (replica, stage, row) in enumerate(zip(replicas, stages, records, strict=True)):
        spans: list[TimeSpan] = []
        last = begin
        for span, messages, _ in row:
            moving = span.begin
            for message in messages:
                others = ((replica, other, message) for other in message.ends - {stage})
                moving = max([moving, *(posted.get(each, begin) for each in others)])
            moving = min(moving, span.end)  # clocks may differ a little
            if moving - last >= SHORTEST:
                spans.append(TimeSpan(rank, "idle", None, last, moving, stage))
            spans.append(span._replace(begin=moving))
            last = span.end
        if end - last >= SHORTEST:
            spans.append(TimeSpan(rank, "idle", None, last, end, stage))
        filled.append(spans)
    return filled

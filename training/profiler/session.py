"""Record the steps of `profile_steps`, and report on them after the last one.

Rank 0 gathers the spans of all ranks, writes timeline.json and timeline.png into the run's folder and logs the bubble.
Clocks differ between machines, so the ranks compare them once before the first recorded step. Cost: 20 ms for the
clocks and, after the last recorded step, about two seconds for the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from common.quantities import duration
from common.whole_files import replace_text
from training.callbacks import Callback
from training.distributed.processes import gather
from training.plan.partition import held_layers
from training.profiler.drawing import draw, trace
from training.profiler.figures import Figures, add_idle_spans
from training.profiler.recorder import Record, Recorder
from training.schedule.walk import Span

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics

TRACE_FILE, CHART_FILE = "timeline.json", "timeline.png"
ROUNDS = 9  # barriers to compare clocks with


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
            spans = {step: add_idle_spans([records[step] for records in gathered], stages) for step in self._records}
            _report(run, stages, spans)
        self._records = {}


def _report(run: Run, stages: Sequence[int], spans: dict[int, list[list[Span]]]) -> None:
    """Log the figures, and write the files.

    Args:
        stages: by rank.
        spans: by step and rank.
    """
    folder, log = Path(run.config.save_path), run.progress.log
    first, last = min(spans), max(spans)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    whole = Figures.from_spans(spans.values())
    log.print(f"timeline of {steps}: {describe(whole, max(stages) + 1)}")
    names = [f"rank {rank}" for rank in range(len(stages))]
    if run.topology.parts:
        held = held_layers(run.topology.parts, max(stages) + 1)
        layers = [" and ".join(f"{begin}-{end - 1}" for begin, end in held[stage]) for stage in stages]
        names = [f"{name}: stage {stages[rank]}, layers {layers[rank]}" for rank, name in enumerate(names)]
    drawn = Figures.from_spans([spans[last]])
    title = f"step {last}: {duration(drawn.seconds)} without the optimizer, bubble {drawn.bubble:.1%}"
    if first < last:  # the log's number
        title += f" ({steps}: {whole.bubble:.1%})"
    try:
        replace_text(folder / TRACE_FILE, json.dumps(trace(spans, names)))
        draw(spans[last], names, title, folder / CHART_FILE)
    except OSError as error:
        log.print(f"warning: the timeline cannot be written: {error}")
    else:
        log.print(f"timeline: {folder / TRACE_FILE} (for ui.perfetto.dev), {folder / CHART_FILE}")


def describe(figures: Figures, ranks: int) -> str:
    """Describe the bubble and, in a pipeline, the slowest stage."""
    bubble = f"bubble {figures.bubble:.1%} of {duration(figures.seconds)}"
    if ranks == 1:
        return bubble
    by_rank = figures.by_rank(ranks)
    slowest = max(by_rank)
    stage = f"stage {by_rank.index(slowest)} is the slowest, {duration(slowest)} a micro-batch"
    return f"{bubble}; {stage}, {slowest * ranks / sum(by_rank) - 1:.1%} above the mean"


def _clock_offset() -> float:
    """Measure by how many seconds this process's `time.perf_counter` is ahead of rank 0's.

    All ranks leave a barrier at about the same moment; the median over several is exact to a tenth of a millisecond.
    """
    left = []
    for _ in range(ROUNDS):
        torch.distributed.barrier()
        left.append(time.perf_counter())
    return median(mine - theirs for mine, theirs in zip(left, gather(left)[0], strict=True))

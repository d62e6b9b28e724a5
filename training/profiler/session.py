"""`profile_steps`: records the steps that are asked for, and reports on them when the last one is done.

Rank 0 gathers the spans of all ranks and writes timeline.json and timeline.png into the run's folder; the log says
what they show. The ranks' clocks, which differ from machine to machine, are compared once before the first of these
steps. A run without `profile_steps` has no object of this class. One that has it pays 20 ms for the clocks and, after
the last recorded step, about two seconds for the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from common.whole_files import replace_text
from training.callbacks import Callback
from training.distributed.processes import gather
from training.plan.partition import held_layers
from training.profiler.drawing import draw, trace
from training.profiler.figures import Figures, with_idle
from training.profiler.recorder import Record, Recorder
from training.schedule.walk import Span

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.engine.trainer import Trainer
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics

TRACE_FILE, CHART_FILE = "timeline.json", "timeline.png"
ROUNDS = 9  # barriers by which clocks are compared


class ProfiledSteps(Callback):
    """Record the steps of `profile_steps` and draw their timeline."""

    def on_start(self, run: Run) -> None:
        steps, folder = run.config.profile_steps, Path(run.config.save_path)
        assert steps is not None
        self._timeline = Timeline(steps, run.trainer, run.topology.parts, folder, run.progress.log)

    def around_step(self, run: Run, step: int, batch: GlobalBatch) -> AbstractContextManager[None]:
        return self._timeline.step(step)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        if metrics.step == self._timeline.steps[1]:
            self._timeline.finish()

    def on_end(self, run: Run, step: int) -> None:
        self._timeline.finish()


@dataclass
class Timeline:
    """The recorded steps of this run. All ranks call its methods together.

    Attributes:
        steps: the first and the last step to record.
        parts: layers of each stage; empty without a pipeline.
        folder: the run's.
        log: of rank 0.
        spans: by step and rank, on rank 0 after `finish`.
    """

    steps: tuple[int, int]
    trainer: Trainer
    parts: Sequence[int]
    folder: Path
    log: Console
    spans: dict[int, list[list[Span]]] = field(default_factory=dict)
    _recorder: Recorder | None = None
    _records: dict[int, list[Record]] = field(default_factory=dict)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is step `number`; it is recorded where the config asks for that."""
        if not self.steps[0] <= number <= self.steps[1]:
            yield
            return
        engine = self.trainer.engine
        if self._recorder is None:
            self._recorder = Recorder(torch.distributed.get_rank(), engine.device, _clock_offset())
        with self._recorder.step(engine) as self._records[number]:
            yield

    def finish(self) -> None:
        """Write and report what was recorded, unless it is done already: after the last step, or the run's end."""
        if self._recorder is None:
            self.log.print(f"timeline: none; this run had no step from {self.steps[0]} to {self.steps[1]}")
        if not self._records:
            return
        stages = gather(self.trainer.stage)
        gathered = [self._records] * len(stages) if torch.distributed.get_rank() == 0 else None
        torch.distributed.gather_object(self._records, gathered)
        if gathered:
            self.spans = {step: with_idle([records[step] for records in gathered], stages) for step in self._records}
            self._report(stages)
        self._records = {}

    def _report(self, stages: Sequence[int]) -> None:
        """Log the figures, and write the files."""
        first, last = min(self.spans), max(self.spans)
        ranks = max(stages) + 1
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        self.log.print(f"timeline of {steps}: {findings(Figures.of(self.spans.values(), ranks))}")
        names = [f"rank {rank}" for rank in range(len(stages))]
        if self.parts:
            held = held_layers(self.parts, ranks)
            layers = [" and ".join(f"{begin}-{end - 1}" for begin, end in held[stage]) for stage in stages]
            names = [f"{name}: stage {stages[rank]}, layers {layers[rank]}" for rank, name in enumerate(names)]
        shown = Figures.of([self.spans[last]], ranks)
        title = f"step {last}: {shown.seconds:.3g} s without the optimizer, bubble {shown.bubble:.1%}"
        try:
            replace_text(self.folder / TRACE_FILE, json.dumps(trace(self.spans, names)))
            draw(self.spans[last], names, title, self.folder / CHART_FILE)
        except OSError as error:
            self.log.print(f"warning: the timeline cannot be written: {error}")
            return
        self.log.print(f"timeline: {self.folder / TRACE_FILE} (for ui.perfetto.dev), {self.folder / CHART_FILE}")


def findings(figures: Figures) -> str:
    """The bubble; in a pipeline also the slowest stage."""
    bubble = f"bubble {figures.bubble:.1%} of {figures.seconds:.3g} s"
    if figures.ranks == 1:
        return bubble
    slowest = max(figures.by_rank)
    above = slowest * figures.ranks / sum(figures.by_rank) - 1
    stage = f"stage {figures.by_rank.index(slowest)} is the slowest, {slowest * 1000:.3g} ms a micro-batch"
    return f"{bubble}; {stage}, {above:.1%} above the mean"


def _clock_offset() -> float:
    """What this process's `time.perf_counter` is ahead of rank 0's, in seconds.

    All ranks leave a barrier at about the same moment; the median over several is good to a tenth of a millisecond.
    """
    left = []
    for _ in range(ROUNDS):
        torch.distributed.barrier()
        left.append(time.perf_counter())
    return median(mine - theirs for mine, theirs in zip(left, gather(left)[0], strict=True))

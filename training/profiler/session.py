"""`profile_steps`: records the steps that are asked for, and tells about them when the last one is done.

Rank 0 gathers the spans of all ranks and writes timeline.json and timeline.png into the run's folder; the log says
what they show. The ranks' clocks, which differ from machine to machine, are compared once before the first of these
steps. A run without `profile_steps` has no object of this class. One that has it pays 20 ms for the clocks and, after
the last recorded step, about two seconds for the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from data.loader import GlobalBatch
from models.spec import ModelSpec
from training.atomic_files import replace_text
from training.distributed.processes import gather
from training.engine.trainer import Trainer
from training.metrics.flops import layer_flops
from training.profiler.chart import draw
from training.profiler.figures import Figures
from training.profiler.recorder import DeviceClock, HostClock, Record, Recorder
from training.profiler.trace import trace
from training.profiler.waiting import Seat, with_idle
from training.schedule.simulation import Span

TRACE_FILE, CHART_FILE = "timeline.json", "timeline.png"
ROUNDS = 9  # barriers by which clocks are compared

Rows = list[list[Span]]


class Timeline:
    """The recorded steps of this run. All ranks call its methods together.

    Attributes:
        last: the last step to record.

    Args:
        steps: the first and the last step to record.
        parts: layers of each stage; empty without a pipeline.
        folder: the run's.
        log: where rank 0 tells what it found.
    """

    def __init__(
        self,
        steps: tuple[int, int],
        trainer: Trainer,
        spec: ModelSpec,
        parts: Sequence[int],
        folder: Path,
        log: Console,
    ) -> None:
        self._first, self.last = steps
        self._trainer = trainer
        self._spec = spec
        self._parts = parts
        self._folder = folder
        self._log = log
        self._recorder: Recorder | None = None
        self._records: dict[int, list[Record]] = {}
        self._lengths: list[int] = []
        self._supervised = 0
        self._micro_batches = 0

    @contextmanager
    def step(self, number: int, batch: GlobalBatch) -> Iterator[None]:
        """The block is step `number`; it is recorded where the config asks for that."""
        if not self._first <= number <= self.last:
            yield
            return
        if self._recorder is None:
            clock = DeviceClock() if self._trainer.engine.device.type == "cuda" else HostClock()
            self._recorder = Recorder(torch.distributed.get_rank(), clock, _clock_offset())
        with self._recorder.step(self._trainer.engine):
            yield
        self._records[number] = self._recorder.take()
        self._lengths += batch.lengths
        self._supervised += batch.supervised
        self._micro_batches = batch.n_micro_batches

    def finish(self) -> None:
        """Write and tell what was recorded, unless it is done already: after the last step, or the end of the run."""
        if self._recorder is None:
            self._log.print(f"timeline: none; this run had no step from {self._first} to {self.last}")
        if not self._records:
            return
        stages = gather(self._trainer.stage)
        everything: list[dict[int, list[Record]]] | None = None
        if torch.distributed.get_rank() == 0:
            everything = [{} for _ in stages]
        torch.distributed.gather_object(self._records, everything)
        if everything:
            seats = [Seat(stage, stages[:rank].count(stage)) for rank, stage in enumerate(stages)]
            self._tell(
                {step: with_idle([records[step] for records in everything], seats) for step in self._records}, seats
            )
        self._records = {}

    def _tell(self, steps: dict[int, Rows], seats: Sequence[Seat]) -> None:
        first, last = min(steps), max(steps)
        ranks = max(seat.stage for seat in seats) + 1
        figures = Figures.of(steps.values(), ranks)
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        self._log.print(f"timeline of {which}: {self._findings(figures)}")
        names = [self._name(rank, seat, ranks) for rank, seat in enumerate(seats)]
        shown = Figures.of([steps[last]], ranks)
        title = f"step {last}: {shown.seconds:.3g} s without the optimizer, bubble {shown.bubble:.1%}"
        try:
            replace_text(self._folder / TRACE_FILE, json.dumps(trace(steps, names)))
            draw(steps[last], names, title, self._folder / CHART_FILE)
        except OSError as error:
            self._log.print(f"warning: the timeline cannot be written: {error}")
            return
        self._log.print(f"timeline: {self._folder / TRACE_FILE} (for ui.perfetto.dev), {self._folder / CHART_FILE}")

    def _findings(self, figures: Figures) -> str:
        """The bubble; in a pipeline also the slowest stage, and the parts that would be better."""
        told = f"bubble {figures.bubble:.1%} of {figures.seconds:.3g} s"
        if figures.ranks == 1:
            return told
        by_rank = figures.by_rank
        mean = sum(by_rank) / len(by_rank)
        slowest = max(range(figures.ranks), key=by_rank.__getitem__)
        told += f"; stage {slowest} is the slowest, {by_rank[slowest] * 1000:.3g} ms a micro-batch, "
        told += f"{by_rank[slowest] / mean - 1:.1%} above the mean"
        better = figures.better_parts(
            self._parts, layer_flops(self._spec, self._lengths, self._supervised), self._micro_batches
        )
        if better is None:
            return f"{told}; no other parts would be much faster"
        parts, gain = better
        return f"{told}; parts {parts} would make it {gain - 1:.0%} faster, where the memory suffices"

    def _name(self, rank: int, seat: Seat, ranks: int) -> str:
        name = f"rank {rank}"
        if self._parts:
            stretches = [seat.stage] + ([2 * ranks - 1 - seat.stage] if len(self._parts) == 2 * ranks else [])
            begins = [sum(self._parts[:stage]) for stage in stretches]
            layers = [f"{b}-{b + self._parts[s] - 1}" for b, s in zip(begins, stretches, strict=True)]
            name += f": stage {seat.stage}, layers {' and '.join(layers)}"
        return name


def _clock_offset() -> float:
    """What this process's `time.perf_counter` is ahead of rank 0's, in seconds.

    All ranks leave a barrier at about the same moment; the median over several is good to a tenth of a millisecond.
    """
    left = []
    for _ in range(ROUNDS):
        torch.distributed.barrier()
        left.append(time.perf_counter())
    return median(mine - theirs for mine, theirs in zip(left, gather(left)[0], strict=True))

"""Compare the plan with the first steps of a start, and correct later plans by them.

The first `WARM_UP` steps are not counted, as they compile and allocate; the next `COUNTED` are. A shorter start is not
measured: one or two steps may be a hiccup. The log compares each stage's time, the median of these steps, and its peak
with the plan. measured.json in the run's folder keeps them, and corrects later plans and `parts: auto` of runs of the
same kind (`Basis.conditions`).

A stage's time is that of all its layers. So each kind of layer gets one factor, which fit the times of all stages best
(least squares, smallest change), and what remains of a stage goes to each of its layers. Planned memory only grows, as
longer rows may still come.

Where another stage split would make a step at least `GAIN` times as fast, and fit, `rebalance: true` takes it at the
next checkpoint: all processes save and start over (`training.distributed.joining.start_over`), at most `MOVES` times
in a run's folder. A smaller gain may be the measurement's own error, and a move costs a start.

Cost: some 10 microseconds a pass in `COUNTED` steps; once a plan on rank 0, a second or two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from common.quantities import duration, gigabytes
from common.whole_files import replace_text
from data.loader import GlobalBatch
from options.planner.inputs import Basis, Workload, layer_kinds
from options.planner.measurements import MEASURED_FILE, Measured
from options.planner.plan import Plan
from training.callbacks import Callback, JobView
from training.distributed.processes import gather
from training.loop import Run
from training.metrics.devices import Device, mixed, this_device
from training.metrics.peak_memory import peak_memory
from training.metrics.step_metrics import StepMetrics
from training.objective import ModelAndRecords
from training.schedule.instructions import PASSES

WARM_UP, COUNTED = 2, 5
GAIN = 1.03
MOVES = 2
SURE = 0.05  # a kind of layer with a smaller share of a stage's time is hardly corrected
LEAST = 0.1  # smallest factor of a kind, relative to all layers


class StageClock:
    """Measure a stage's own time in a step, without waiting for other stages.

    Two marks frame each pass: forward, backward, or for the gradients of weights. On a GPU they are events in its
    queue, read once the step's loss has come, so nobody waits for one. On a CPU they read the thread's processor time,
    as wall time includes what other programs take.

    Attributes:
        seconds: for one micro-batch, of each measured step.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def step(self, engine: PipelineEngine, micro_batches: int) -> Iterator[None]:
        """Measure what the engine does in the block, which ends when the step's loss is known."""
        on_gpu = engine.device.type == "cuda"
        mark: Callable[[], Any] = cuda_mark if on_gpu else time.thread_time
        spans: list[tuple[Any, Any]] = []

        def framed(execute: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> None:
                begin = mark()
                execute(*arguments, **named)
                spans.append((begin, mark()))

            return run

        plain = engine._INSTRUCTION_MAP
        passes = {kind: framed(execute) for kind, execute in plain.items() if kind.__name__ in PASSES}
        engine._INSTRUCTION_MAP = plain | passes
        try:
            yield
        finally:
            engine._INSTRUCTION_MAP = plain
        seconds = sum(begin.elapsed_time(end) / 1000 if on_gpu else end - begin for begin, end in spans)
        self.seconds.append(seconds / micro_batches)


def cuda_mark() -> torch.cuda.Event:
    """Record an event in the device's queue."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Feedback(Callback):
    """Compare the first steps with the plan; `rebalance: true` restarts the run with a better stage split."""

    def __init__(self, task: ModelAndRecords, rebalance: bool) -> None:
        self._task, self._rebalance = task, rebalance

    def on_build(self, job: JobView) -> None:
        progress = job.progress
        self._config, self._division, self._log = progress.config, job.division, job.log  # the user's config
        self._before = 0 if torch.cuda.is_available() else peak_memory()
        self._clock = StageClock()
        self._steps = progress.done + 1 + WARM_UP, progress.done + WARM_UP + COUNTED

    def around_step(self, run: Run, step: int, batch: GlobalBatch) -> AbstractContextManager[None]:
        if self._steps[0] <= step <= self._steps[1]:
            return self._clock.step(run.trainer.engine, batch.n_micro_batches)
        return nullcontext()

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        if metrics.step != self._steps[1]:
            return
        peak, moves = max(1, peak_memory() - self._before), False
        ranks = gather((run.trainer.stage, median(self._clock.seconds), peak, this_device()))
        try:
            moves = torch.distributed.get_rank() == 0 and self._compare(ranks)
        except Exception as error:  # a full disk, or a plan that fails: neither is to end a run that trains
            self._log.print(f"warning: plan check failed: {type(error).__name__}: {error}")
        if gather(moves)[0]:
            run.restart = "rebalance"

    def _compare(self, ranks: list[tuple[int, float, int, Device]]) -> bool:
        """Log and keep the measurements; return whether the run is to take a better stage split.

        Args:
            ranks: stage, seconds, peak and device of each.
        """
        config, topology = self._config, self._division.topology
        device = mixed([device for *_, device in ranks])
        workload = Workload.of(self._task.known_loader, config)
        basis, _ = Basis.of_run(config, self._task.spec, workload, device)
        plan = Plan(replace(basis, recompute=self._division.recompute), topology.parts)

        # A stage is as slow, and takes as much memory, as the worst of its ranks.
        seconds, peaks = [0.0] * topology.stages, [0] * topology.stages
        for stage, its_seconds, its_peak, _ in ranks:
            seconds[stage] = max(seconds[stage], its_seconds)
            peaks[stage] = max(peaks[stage], its_peak)
        measured = measure(plan, self._steps, seconds, peaks)

        better = better_parts(Plan(replace(plan.basis, measured=measured), plan.parts))
        moves = better is not None and self._rebalance and measured.moves < MOVES
        measured.better, measured.moves = better and better[0], measured.moves + moves
        for line in comparison(plan, measured):
            self._log.print(line)
        if better:
            taken = "with parts: auto, rebalance: true takes them at a checkpoint"
            if self._rebalance:
                taken = "taken at the next checkpoint" if moves else f"not taken, after {MOVES} times"
            self._log.print(f"plan: parts {better[0]} would make a step {better[1] - 1:.0%} faster; {taken}")
        elif topology.stages > 1:
            self._log.print(f"plan: no other parts would make a step {GAIN - 1:.0%} faster")
        replace_text(Path(config.save_path) / MEASURED_FILE, measured.model_dump_json(indent=2) + "\n")
        return moves


def measure(plan: Plan, steps: tuple[int, int], seconds: list[float], peaks: list[int]) -> Measured:
    """Turn measurements into corrections of a plan.

    Args:
        plan: of these steps, which may have been corrected itself.
        seconds: of each stage for a micro-batch.
        peaks: most bytes of each stage.
    """
    estimated = Plan(replace(plan.basis, measured=None), plan.parts)
    costs = [(layer.forward + layer.backward).total for layer in estimated.times]
    held = [stage.layers for stage in estimated.stages]
    return Measured(
        conditions=plan.basis.conditions,
        steps=steps,
        parts=plan.parts,
        seconds=seconds,
        peaks=peaks,
        layers=layer_factors(costs, layer_kinds(plan.basis.spec), held, seconds),
        beyond=[max(0, peak - stage.memory.peak) for peak, stage in zip(peaks, estimated.stages, strict=True)],
        moves=plan.basis.measured.moves if plan.basis.measured else 0,
    )


def layer_factors(
    costs: Sequence[float], kinds: Sequence[int], held: Sequence[Sequence[int]], seconds: Sequence[float]
) -> list[float]:
    """Return for each layer measured over estimated time, so that the times of all stages come out.

    Args:
        costs, kinds: of each layer.
        held: layers of each stage.
        seconds: measured for each stage.
    """
    common, names = sum(seconds) / sum(costs), sorted(set(kinds))

    # What the kinds of layers take of each stage, [stages, kinds], as shares of what was measured.
    of_kind = numpy.zeros((len(held), len(names)))
    for stage, layers in enumerate(held):
        for layer in layers:
            of_kind[stage, names.index(kinds[layer])] += costs[layer]
    shares = common * of_kind / numpy.array(seconds)[:, None]

    # By least squares a factor for each kind, near to 1 where the stages do not tell the kinds apart.
    missing = numpy.concatenate([1 - shares.sum(axis=1), numpy.zeros(len(names))])
    change = numpy.linalg.lstsq(numpy.vstack([shares, SURE * numpy.eye(len(names))]), missing, rcond=None)[0]
    by_kind = dict(zip(names, common * numpy.maximum(1 + change, LEAST), strict=True))

    # What is left over goes to all layers of a stage alike.
    factors = [float(by_kind[kind]) for kind in kinds]
    for layers, measured in zip(held, seconds, strict=True):
        rest = measured / sum(costs[layer] * factors[layer] for layer in layers)
        for layer in layers:
            factors[layer] *= rest
    return factors


def better_parts(plan: Plan) -> tuple[list[int], float] | None:
    """Return a stage split that fits with which a step is at least `GAIN` times as fast, and its gain; else None."""
    best = Plan.make(replace(plan.basis, config=plan.basis.config.with_parts([]), recompute=None))
    gain = plan.seconds / best.seconds
    return (best.parts, gain) if best.fits and gain >= GAIN else None


def comparison(plan: Plan, measured: Measured) -> list[str]:
    """Compare plan and measurement in lines for the log: one for each stage, and how uneven the stages are."""
    first, last = measured.steps
    planned, seconds = stage_seconds(plan), measured.seconds
    lines = [f"plan vs. measured (steps {first}-{last}): the first {WARM_UP} steps of a start are not counted"]
    for stage, peak in enumerate(measured.peaks):
        lines.append(
            f"plan: stage {stage}: {duration(seconds[stage])} a micro-batch, "
            f"{seconds[stage] / sum(seconds):.1%} of all stages' time (planned {planned[stage] / sum(planned):.1%}); "
            f"peak {gigabytes(peak)} (planned {gigabytes(plan.stages[stage].memory.peak)})"
        )
    slow = max(seconds)
    uneven = f"plan: stage {seconds.index(slow)} takes {slow / mean(seconds) - 1:.0%} longer than the mean"
    return [*lines, uneven] if len(seconds) > 1 else lines


def stage_seconds(plan: Plan) -> list[float]:
    """Return the planned time of each stage for a micro-batch."""
    times = [(layer.forward + layer.backward).total for layer in plan.times]
    return [sum(map(times.__getitem__, stage.layers)) for stage in plan.stages]

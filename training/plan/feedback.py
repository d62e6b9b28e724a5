"""The plan corrects itself: what the first steps of a start take is held against it.

Of a start's steps the first `WARM_UP` are not counted, as they compile and allocate; the next `COUNTED` are. A shorter
start measures nothing, and says so: one or two steps may be a hiccup, which would correct all later plans. Each stage's
own time (`training.engine.stage_clock`), the median of these steps, and its peak are told beside what was planned. What
comes of it lies in measured.json in the run's folder: later plans and `parts: auto` are corrected by it, where a run is
of the same kind (`Basis.conditions`).

A stage tells the time of all its layers together. So each kind of layer gets one factor, by which the times of all
stages are met as well as can be (least squares, the smallest change), and what is then left of a stage goes to each of
its layers. Planned memory only grows by this, as longer rows may still come.

Where other parts would make a step at least `GAIN` times as fast, and fit, `rebalance: true` takes them at the next
checkpoint: all processes save and start anew (`training.distributed.processes.start_over`), in a run's folder `MOVES`
times at most. Less than `GAIN` may be the measurement's own error, and a move costs a start.

Cost: the clock's, in `COUNTED` steps; once a plan on rank 0, a second or two in which the others wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import numpy
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from rich.console import Console

from common.whole_files import replace_text
from data.loader import GlobalBatch, Loader
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.distributed.processes import gather
from training.engine.stage_clock import StageClock
from training.metrics.devices import Device, this_device
from training.metrics.peak_memory import peak_memory
from training.plan.basis import MEASURED_FILE, Basis, Measured
from training.plan.costs import kinds, layer_times
from training.plan.plan import Plan
from training.plan.rendering import GB
from training.plan.workload import Workload
from training.topology import Division

WARM_UP, COUNTED = 2, 5
GAIN = 1.03
MOVES = 2
SURE = 0.05  # a kind of layer that has less of a stage's time is hardly blamed for what the stage takes
LEAST = 0.1  # of the factor of all layers: no kind is taken to be faster than that


@dataclass
class Feedback:
    """Measures the first steps of a start. All ranks make it before their model and call its methods together.

    Attributes:
        config: of the run, as its user has it.
        loader: of the data to plan for; every sample counts as `max_seq_len` tokens where absent.
        first_step, total_steps: of this start and of the run.
        moves: whether the run goes on in better parts from its next checkpoint on.
    """

    config: TrainConfig
    spec: ModelSpec
    division: Division
    loader: Loader | None
    first_step: int
    total_steps: int
    log: Console
    moves: bool = False

    def __post_init__(self) -> None:
        self._before = 0 if torch.cuda.is_available() else peak_memory()
        self._clock = StageClock()
        self._steps = self.first_step + WARM_UP, self.first_step + WARM_UP + COUNTED - 1
        left = self.total_steps - self.first_step + 1
        if 0 < left < WARM_UP + COUNTED:
            self.log.print(f"plan: not held against steps: that takes {WARM_UP + COUNTED}, and {left} are left")

    def step(self, engine: PipelineEngine, number: int, batch: GlobalBatch) -> AbstractContextManager[None]:
        """Around step `number`, which is measured if it is one of those that count."""
        if self._steps[0] <= number <= self._steps[1]:
            return self._clock.step(engine, batch.n_micro_batches)
        return nullcontext()

    def compare(self, stage: int, number: int) -> None:
        """After step `number`: say and keep what was measured, once it is the last one that counts."""
        if number != self._steps[1]:
            return
        peak, moves = max(1, peak_memory() - self._before), False
        taken = gather((stage, median(self._clock.seconds), peak, this_device()))
        try:
            moves = torch.distributed.get_rank() == 0 and self._compare(taken)
        except Exception as error:  # a full disk, or a plan that fails: neither is to end a run that trains
            self.log.print(f"warning: plan: not held against steps: {type(error).__name__}: {error}")
        self.moves = gather(moves)[0]

    def _compare(self, taken: list[tuple[int, float, int, Device]]) -> bool:
        """Whether the run is to take better parts, by each rank's stage, seconds, peak and device."""
        config, topology = self.config, self.division.topology
        device = min((each[3] for each in taken), key=lambda device: device.memory or math.inf)
        basis, _ = Basis.of_run(config, self.spec, Workload.of(self.loader, config), device)
        plan = Plan(replace(basis, recompute=self.division.recompute), topology.parts)
        by_stage = [[each for each in taken if each[0] == stage] for stage in range(topology.stages)]
        seconds = [max(seconds for _, seconds, _, _ in ranks) for ranks in by_stage]
        measured = measure(plan, self._steps, seconds, [max(peak for _, _, peak, _ in ranks) for ranks in by_stage])
        better = better_parts(Plan(replace(plan.basis, measured=measured), plan.parts))
        moves = better is not None and config.rebalance and measured.moves < MOVES
        measured.better, measured.moves = better and better[0], measured.moves + moves
        what = f"no other parts would make a step {GAIN - 1:.0%} faster"
        if better:
            what = f"parts {better[0]} would make a step {better[1] - 1:.0%} faster; "
            if config.rebalance:
                what += "taken at the next checkpoint" if moves else f"not taken, after {MOVES} times"
            else:
                what += "with parts: auto, rebalance: true takes them at a checkpoint"
        for line in [*differences(plan, measured), *([what] if topology.stages > 1 else [])]:
            self.log.print(f"plan: {line}")
        replace_text(Path(config.save_path) / MEASURED_FILE, measured.model_dump_json(indent=2) + "\n")
        return moves


def measure(plan: Plan, steps: tuple[int, int], seconds: list[float], peaks: list[int]) -> Measured:
    """What steps took, as it corrects a plan: seconds of each stage for a micro-batch, and its bytes at most.

    Args:
        plan: of these steps, which may have been corrected itself.
    """
    estimated = Plan(replace(plan.basis, measured=None), plan.parts)
    costs = [(layer.forward + layer.backward).total for layer in layer_times(estimated.basis)]
    held = [stage.layers for stage in estimated.stages]
    return Measured(
        conditions=plan.basis.conditions,
        steps=steps,
        parts=plan.parts,
        seconds=seconds,
        peaks=peaks,
        layers=layer_factors(costs, kinds(plan.basis.spec), held, seconds),
        beyond=[max(0, peak - stage.memory.peak) for peak, stage in zip(peaks, estimated.stages, strict=True)],
        moves=plan.basis.measured.moves if plan.basis.measured else 0,
    )


def layer_factors(
    costs: Sequence[float], kinds: Sequence[int], held: Sequence[Sequence[int]], seconds: Sequence[float]
) -> list[float]:
    """How many times its estimated cost each layer takes, so that the times of all stages come out.

    Args:
        costs, kinds: of each layer.
        held: the layers of each stage.
        seconds: that each stage takes.
    """
    common, names = sum(seconds) / sum(costs), sorted(set(kinds))
    of_kind = [[sum(costs[layer] for layer in layers if kinds[layer] == name) for name in names] for layers in held]
    shares = common * numpy.array(of_kind) / numpy.array(seconds)[:, None]
    missing = numpy.concatenate([1 - shares.sum(axis=1), numpy.zeros(len(names))])
    change = numpy.linalg.lstsq(numpy.vstack([shares, SURE * numpy.eye(len(names))]), missing, rcond=None)[0]
    by_kind = dict(zip(names, common * numpy.maximum(1 + change, LEAST), strict=True))
    factors = [float(by_kind[kind]) for kind in kinds]
    for layers, took in zip(held, seconds, strict=True):
        rest = took / sum(costs[layer] * factors[layer] for layer in layers)
        for layer in layers:
            factors[layer] *= rest
    return factors


def better_parts(plan: Plan) -> tuple[list[int], float] | None:
    """Parts that fit and with which a step is at least `GAIN` times as fast, and how many times; None without any."""
    config = plan.basis.config
    recompute = None if config.use_grad_ckpt == "auto" else plan.basis.recompute
    best = Plan.make(replace(plan.basis, config=config.with_parts([]), recompute=recompute))
    gain = plan.seconds / best.seconds
    return (best.parts, gain) if best.fits and gain >= GAIN else None


def differences(plan: Plan, measured: Measured) -> list[str]:
    """What was planned and what was measured, a line for each stage, and how uneven the stages are."""
    first, last = measured.steps
    planned, seconds = stage_seconds(plan), measured.seconds
    lines = [f"held against steps {first} to {last}; the first {WARM_UP} of a start are not counted"]
    for stage, peak in enumerate(measured.peaks):
        lines.append(
            f"stage {stage}: {1000 * seconds[stage]:.3g} ms a micro-batch, {seconds[stage] / sum(seconds):.1%} of all "
            f"stages' time (planned {planned[stage] / sum(planned):.1%}); at most {peak / GB:.2f} GB (planned "
            f"{plan.stages[stage].memory.peak / GB:.2f})"
        )
    slowest = max(seconds)
    return [*lines, f"stage {seconds.index(slowest)} takes {slowest / mean(seconds) - 1:.0%} longer than the mean"]


def stage_seconds(plan: Plan) -> list[float]:
    """What each stage is planned to take for a micro-batch."""
    times = [(layer.forward + layer.backward).total for layer in layer_times(plan.basis)]
    return [sum(times[layer] for layer in stage.layers) for stage in plan.stages]

"""The plan corrects itself: what the first steps of a start take is held against it.

Of a start's steps the first `WARM_UP` are not counted, as they compile and allocate; the next `COUNTED` are. Each
stage's own time (`training.engine.stage_clock`), the median of these steps, and its peak are told beside what was
planned. What comes of it lies in measured.json in the run's folder: later plans and `parts: auto` are corrected by it,
where a run is of the same kind (`Basis.conditions`).

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
from typing import NamedTuple

import numpy
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from rich.console import Console

from data.loader import GlobalBatch, Loader
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.distributed.processes import gather
from training.engine.stage_clock import StageClock
from training.metrics.devices import Device, this_device
from training.metrics.peak_memory import peak_memory
from training.plan.basis import MEASURED_FILE, Basis, Measured, Workload
from training.plan.costs import kinds, layer_times
from training.plan.plan import Plan
from training.plan.rendering import GB
from training.topology import Division

WARM_UP, COUNTED = 2, 5
GAIN = 1.03
MOVES = 2
SURE = 0.05  # a kind of layer that has less of a stage's time is hardly blamed for what the stage takes
LEAST = 0.1  # of the factor of all layers: no kind is taken to be faster than that


class Taken(NamedTuple):
    """What one rank says: seconds for a micro-batch, and bytes at most."""

    stage: int
    seconds: float
    peak: int
    device: Device


@dataclass
class Feedback:
    """Measures the first steps of a start. All ranks make it before their model and call its methods together.

    Attributes:
        config: of the run, as its user has it.
        loader: of the data to plan for; every sample counts as `max_seq_len` tokens where absent.
        first_step: of this start.
        moves: whether the run goes on in better parts from its next checkpoint on.
    """

    config: TrainConfig
    spec: ModelSpec
    division: Division
    loader: Loader | None
    first_step: int
    log: Console
    moves: bool = False

    def __post_init__(self) -> None:
        self._before = 0 if torch.cuda.is_available() else peak_memory()
        self._clock = StageClock()
        self._steps = self.first_step + WARM_UP, self.first_step + WARM_UP + COUNTED - 1

    def step(self, engine: PipelineEngine, number: int, batch: GlobalBatch) -> AbstractContextManager[None]:
        """Around step `number`, which is measured if it is one of those that count."""
        if self._steps[0] <= number <= self._steps[1]:
            return self._clock.step(engine, batch.n_micro_batches)
        return nullcontext()

    def compare(self, stage: int, number: int) -> None:
        """After step `number`: say and keep what was measured, once it is the last one that counts."""
        if number != self._steps[1]:
            return
        peak = max(1, peak_memory() - self._before)
        taken = gather(Taken(stage, median(self._clock.seconds), peak, this_device()))
        self.moves = gather(torch.distributed.get_rank() == 0 and self._compare(taken))[0]

    def _compare(self, taken: Sequence[Taken]) -> bool:
        """Whether the run is to take better parts."""
        topology, save_path = self.division.topology, Path(self.config.save_path)
        stages = [[each for each in taken if each.stage == stage] for stage in range(topology.stages)]
        device = min((each.device for each in taken), key=lambda device: device.memory or math.inf)
        basis, _ = Basis.of_run(self.config, self.spec, Workload.of(self.loader, self.config), device)
        plan = Plan(replace(basis, recompute=self.division.recompute), topology.parts)
        measured = measure(
            plan,
            self._steps,
            [max(each.seconds for each in stage) for stage in stages],
            [max(each.peak for each in stage) for stage in stages],
        )
        better = better_parts(Plan(replace(plan.basis, measured=measured), plan.parts))
        moves = bool(better) and self.config.rebalance and measured.moves < MOVES
        measured.better = better[0] if better else None
        measured.moves += moves
        for line in differences(plan, measured):
            self.log.print(line)
        if topology.stages > 1:
            advice = f"no other parts would make a step {GAIN - 1:.0%} faster"
            if better:
                how = "rebalance: true takes them at the next checkpoint"
                if self.config.rebalance:
                    how = "taken at the next checkpoint" if moves else f"not taken, after {MOVES} times (rebalance)"
                advice = f"parts {better[0]} would make a step {better[1] - 1:.0%} faster; {how}"
            self.log.print(f"{imbalance(measured.seconds)}; {advice}")
        try:
            measured.write(save_path)
        except OSError as error:
            self.log.print(f"warning: {MEASURED_FILE} could not be written: {error.strerror or error}")
            return False
        return moves


def measure(plan: Plan, steps: tuple[int, int], seconds: list[float], peaks: list[int]) -> Measured:
    """What steps took, as it corrects a plan.

    Args:
        plan: of these steps, which may have been corrected itself.
        seconds: of each stage for a micro-batch.
        peaks: bytes that each stage had at most.
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
    """What was planned and what was measured, a line for each stage."""
    first, last = measured.steps
    times = [(layer.forward + layer.backward).total for layer in layer_times(plan.basis)]
    planned = [sum(times[layer] for layer in stage.layers) for stage in plan.stages]
    lines = [f"plan: held against steps {first} to {last}; the first {WARM_UP} of a start are not counted"]
    for number, (stage, seconds, peak) in enumerate(zip(plan.stages, measured.seconds, measured.peaks, strict=True)):
        share, expected = seconds / sum(measured.seconds), planned[number] / sum(planned)
        lines.append(
            f"plan: stage {number}: {1000 * seconds:.3g} ms a micro-batch, {share:.1%} of all stages' time (planned "
            f"{expected:.1%}); at most {peak / GB:.2f} GB (planned {stage.memory.peak / GB:.2f})"
        )
    return lines


def imbalance(seconds: Sequence[float]) -> str:
    """How far the slowest stage is above the others."""
    slowest = max(seconds)
    return f"plan: stage {seconds.index(slowest)} takes {slowest / mean(seconds) - 1:.0%} longer than the mean"

"""Plan of a run: time and memory of its stages, speed, and whether it fits."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter

from models.flops import ModelFlops
from options.planner.costs import LayerTime, Spent, times_of_stages
from options.planner.inputs import Basis
from options.planner.memory import MemoryModel, StageMemory
from options.planner.partition import Fits, LayerRange, best_split, held_layers, layers_of
from options.planner.simulation import simulate
from training.config.precision import training_dtype
from training.metrics.devices import Device
from training.schedule.walk import Simulation
from training.topology import layer_ranges

ERROR = 0.05  # of a plan's memory, as measured (docs/performance.md#the-planner)
RESOLUTION = 1e-12  # seconds that count as one, so that sums of costs are exact
TOLERANCE = 1.01  # step by which the least memory is searched where nothing fits
MOST_STEPS = 1000  # by that factor: 20,000 times the memory that there is


@dataclass(frozen=True)
class StagePlan:
    """One rank of the pipeline."""

    ranges: tuple[LayerRange, ...]  # its layers; two with dualpipev
    layers: list[int]
    parameters: int  # of these layers, on one rank
    memory: StageMemory
    spent: Spent  # its time in a step
    device: Device  # of its processes

    @property
    def seconds(self) -> float:
        return self.spent.total

    @property
    def filled(self) -> float:
        """Return the share of the device's memory that it takes at most; bytes, where that is not known."""
        return self.memory.peak / (self.device.memory or 1)


@dataclass(frozen=True)
class Plan:
    """Plan of a run with this stage split."""

    basis: Basis
    parts: list[int]

    @classmethod
    def make(cls, basis: Basis) -> Plan:
        """Plan the config's stage split or, with `auto`, the best one; recomputation likewise.

        Raises:
            ConfigError: the config and the model do not fit each other.
        """
        plan = cls(basis, basis.config.parts_for(basis.spec.n_layers) or best_parts(basis))
        if basis.config.use_grad_ckpt != "auto":
            return plan
        chosen = [plan.memory.fewest_recomputed(rank, held) for rank, held in enumerate(plan.held)]
        return cls(replace(basis, recompute=frozenset().union(*chosen)), plan.parts)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.basis)

    @property
    def held(self) -> list[tuple[LayerRange, ...]]:
        """Ranges of layers of each rank."""
        return held_layers(self.parts, self.basis.config.model_topo.stages)

    @cached_property
    def stages(self) -> list[StagePlan]:
        """By rank."""
        found = []
        for rank, held in enumerate(self.held):
            layers = layers_of(held)
            weights = sum(self.basis.parameters[layer] for layer in layers)
            spent = sum((self.times[layer].step(self.basis.micro_batches) for layer in layers), Spent())
            memory, device = self.memory.rank(rank, held), self.basis.of_stages[rank]
            found.append(StagePlan(held, layers, weights, memory, spent, device))
        return found

    @cached_property
    def times(self) -> list[LayerTime]:
        """By layer, on its stage's devices."""
        times: dict[int, LayerTime] = {}
        for of_stage, held in zip(times_of_stages(self.basis), self.held, strict=True):
            times |= {layer: of_stage[layer] for layer in layers_of(held)}
        return [times[layer] for layer in sorted(times)]

    def simulated(self, micro_batches: int) -> Simulation:
        """Simulate the passes of so many micro-batches, each chunk of rows by itself."""
        basis, chunks = self.basis, self.basis.row_chunks
        forward, backward = [], []
        for begin, end in layer_ranges(self.parts):
            forward.append(sum(time.forward.total for time in self.times[begin:end]) / chunks)
            backward.append(sum(time.backward.total for time in self.times[begin:end]) / chunks)
        hidden = basis.share.micro_tokens * basis.spec.config.hidden_size * training_dtype(basis.config).itemsize
        transfers = basis.transfers(hidden / chunks)
        return simulate(basis.schedule, forward, backward, micro_batches, transfers, chunks)

    @property
    def enough(self) -> int:
        """Micro-batches that fill the pipeline; more repeat its middle."""
        return min(self.basis.micro_batches, max(2, math.ceil(8 * self.basis.config.chunks / self.basis.row_chunks)))

    @cached_property
    def seconds(self) -> float:
        """Time of a step, of which only so much is simulated as fills the pipeline."""
        basis, number = self.basis, self.enough
        seconds = self.simulated(number).seconds
        if left := basis.micro_batches - number:
            before = number // 2
            seconds += left * (seconds - self.simulated(before).seconds) / (number - before)

        updates = [time.update.total for time in self.times]
        return seconds + max(sum(map(updates.__getitem__, stage.layers)) for stage in self.stages)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which nothing is computed."""
        return max(0.0, 1 - sum(stage.seconds for stage in self.stages) / (len(self.stages) * self.seconds))

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s over all replicas, without padding."""
        return self.basis.workload.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """MFU as in `options.planner.utilization`; None where the device's peak is not known, and in fp32."""
        config, work = self.basis.config, self.basis.workload
        if not self.basis.device.known or not (config.bf16.enabled or config.fp16.enabled):
            return None
        padded = work.micro_tokens * work.micro_batches * config.model_topo.row_replicas
        documents = work.tokens / work.attended
        flops = ModelFlops(self.basis.spec).by_layer([work.attended], padded * work.supervised / documents)
        total = documents * sum(flops)
        peaks = [device.half for device in self.basis.device.each] or [self.basis.device.half]
        return total / self.seconds / (sum(peaks) / len(peaks) * config.model_topo.processes)

    @property
    def knows_seconds(self) -> bool:
        """Return whether times are seconds; else only their proportions are known."""
        return bool(self.basis.measured or self.basis.calibration) or self.basis.device.known

    @property
    def peak(self) -> int:
        """Most bytes of any rank."""
        return max(stage.memory.peak for stage in self.stages)

    @property
    def fullest(self) -> StagePlan:
        """The stage with the least of its memory to spare."""
        return max(self.stages, key=attrgetter("filled"))

    @property
    def fits(self) -> bool:
        """Return whether every rank has the memory; always, where that is not known."""
        return self.basis.device.memory is None or self.fullest.filled <= 1

    @property
    def is_tight(self) -> bool:
        """Return whether the plan may err by more than the memory that it leaves free."""
        return self.basis.device.memory is not None and self.fullest.filled > 1 - ERROR


def best_parts(basis: Basis) -> list[int]:
    """Return the best stage split; where none fits, the best one within the least memory that admits one."""
    memory = MemoryModel(basis)
    limits = [device.memory or math.inf for device in basis.of_stages]
    peak = cache(lambda rank, ranges: memory.rank(rank, ranges).peak)

    @cache
    def within(steps: int) -> list[int] | None:
        return _split(basis, lambda rank, ranges: peak(rank, ranges) <= limits[rank] * TOLERANCE**steps)

    least = within(0) or within(bisect_left(range(MOST_STEPS), True, key=lambda steps: within(steps) is not None))
    assert least is not None
    return least


def fitting_plan(basis: Basis) -> Plan | None:
    """Plan the config's stage split, or the best one that fits; None where none does."""
    layers = basis.spec.n_layers
    parts = (basis.config.parts_for(layers) or fitting_parts(basis)) if basis.in_stages else [layers]
    plan = Plan(basis, parts) if parts else None
    return plan if plan and plan.fits else None


def fitting_parts(basis: Basis, within: float = math.inf) -> list[int] | None:
    """Return the best stage split that fits in memory, if any does.

    Args:
        within: seconds of a step; slower splits need not be found.
    """
    return _split(basis, MemoryModel(basis).fits, within)


def _split(basis: Basis, fits: Fits, within: float = math.inf) -> list[int] | None:
    def cost(time: LayerTime) -> int:
        return round(time.step(basis.micro_batches).total / RESOLUTION)

    costs = [list(map(cost, times)) for times in times_of_stages(basis)]
    config, first = basis.config, basis.spec.first_layers
    return best_split(costs, fits, config.v_schedule, within / RESOLUTION, first)

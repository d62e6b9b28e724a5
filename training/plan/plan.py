"""The plan of a run: its stages with their time and memory, and what comes of them.

With `parts: auto` the layers are divided so that the slowest stage is as fast as can be in the memory that there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate

from models.spec import ModelSpec
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.metrics.devices import Device, this_device
from training.metrics.flops import ModelFlops
from training.plan.activation_memory import Saved
from training.plan.calibration import Calibration
from training.plan.costs import Factors, LayerTime, LayerTimes
from training.plan.memory import MemoryModel, StageMemory
from training.plan.partition import Fits, LayerRange, best_split
from training.plan.workload import Workload
from training.schedule.simulation import simulate

DAY = 86_400.0
RESOLUTION = 1e-12  # seconds that count as one, so that sums of costs are exact
TOLERANCE = 0.01  # how closely the least memory is looked for where nothing fits


@dataclass(frozen=True)
class Basis:
    """What a plan rests on.

    Attributes:
        workload: what the run is fed with.
        calibration: what was measured; all is estimated where absent.
        recompute: the layers that do; as the config says, and with `auto` all, where absent.
        known: see `MemoryModel`.
    """

    config: TrainConfig
    spec: ModelSpec
    workload: Workload
    device: Device
    calibration: Calibration | None = None
    recompute: frozenset[int] | None = None
    known: dict[tuple[object, ...], Saved] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def recomputed(self) -> frozenset[int]:
        return self.config.recomputed(self.spec.n_blocks) if self.recompute is None else self.recompute

    @cached_property
    def times(self) -> LayerTimes:
        known = self.calibration
        device, factors = (this_device(), known.factors) if known else (self.device, Factors())
        return LayerTimes(self.spec, self.config, self.workload, device, self.recomputed, factors)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.spec, self.config, self.workload, self.device, self.recomputed, self.known)


@dataclass(frozen=True)
class StagePlan:
    """One rank of the pipeline.

    Attributes:
        ranges: the layers that it holds, [begin, end); two with dualpipev.
        parameters: their weights.
        micro_batch, update, seconds: of work for a micro-batch, of the optimizer, and of both in a step.
    """

    ranges: tuple[LayerRange, ...]
    parameters: int
    memory: StageMemory
    micro_batch: float
    update: float
    seconds: float

    @property
    def layers(self) -> list[int]:
        return [layer for begin, end in self.ranges for layer in range(begin, end)]


@dataclass(frozen=True)
class Plan:
    """What a run with these parts will take."""

    basis: Basis
    parts: list[int]

    @classmethod
    def make(cls, basis: Basis) -> Plan:
        """With the parts that the config names or, with `auto`, the best ones; recomputation likewise.

        Raises:
            ConfigError: the config and the model do not fit each other.
        """
        basis = replace(basis, recompute=None)
        plan = cls(basis, basis.config.parts_for(basis.spec.n_layers) or best_parts(basis))
        if basis.config.use_grad_ckpt != "auto":
            return plan
        chosen = [basis.memory.fewest_recomputed(rank, held) for rank, held in enumerate(plan.held)]
        return cls(replace(basis, recompute=frozenset().union(*chosen)), plan.parts)

    @cached_property
    def _chunks(self) -> list[LayerRange]:
        ends = list(accumulate(self.parts))
        return list(zip([0, *ends], ends, strict=False))

    @cached_property
    def held(self) -> list[tuple[LayerRange, ...]]:
        """The ranges of layers of each rank."""
        outward = self._chunks[: self.basis.config.model_topo.stages]
        return list(
            zip(outward, reversed(self._chunks), strict=False) if self.basis.config.v_schedule else zip(outward)
        )

    @cached_property
    def stages(self) -> list[StagePlan]:
        """By rank."""
        found = []
        for rank, held in enumerate(self.held):
            layers = [layer for begin, end in held for layer in range(begin, end)]
            weights = sum(shape.numel() for layer in layers for shape in self.basis.spec.shapes(layer).values())
            micro_batch = sum(self._times[layer].forward + self._times[layer].backward for layer in layers)
            update = sum(self._times[layer].update for layer in layers)
            seconds = self.micro_batches * micro_batch + update
            found.append(StagePlan(held, weights, self.basis.memory.rank(rank, held), micro_batch, update, seconds))
        return found

    @property
    def micro_batches(self) -> int:
        """Of one replica in a step."""
        return max(self.basis.workload.micro_batches, self.basis.config.least_micro_batches)

    @cached_property
    def _times(self) -> list[LayerTime]:
        return [self.basis.times.layer(layer) for layer in range(self.basis.spec.n_layers)]

    @cached_property
    def seconds(self) -> float:
        """Of a step. As many micro-batches are simulated as fill the pipeline well; more only repeat its middle."""
        config, work = self.basis.config, self.basis.workload
        chunks = [self._times[begin:end] for begin, end in self._chunks]
        step = simulate(
            config.schedule if config.v_schedule else "1f1b",
            [sum(time.forward for time in times) for times in chunks],
            [sum(time.backward for time in times) for times in chunks],
            count := min(self.micro_batches, 8 * config.chunks),
            work.micro_tokens
            * self.basis.spec.config.hidden_size
            * training_dtype(config).itemsize
            / self.basis.device.link,
        )
        more = (self.micro_batches - count) * max(stage.micro_batch for stage in self.stages)
        return step.seconds + more + max(stage.update for stage in self.stages)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which nothing is computed."""
        return 1 - sum(stage.seconds for stage in self.stages) / (len(self.stages) * self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Over all replicas, without padding."""
        return self.basis.workload.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation (`metrics.flops`); None where the device's peak is not known, and in fp32."""
        config, work = self.basis.config, self.basis.workload
        if not self.basis.device.known or not (config.bf16.enabled or config.fp16.enabled):
            return None
        padded = work.micro_tokens * work.micro_batches * config.model_topo.replicas
        documents = work.tokens / work.attended
        flops = ModelFlops(self.basis.spec).by_layer([work.attended], padded * work.supervised / documents)
        total = documents * sum(flops)
        return total / self.seconds / (self.basis.device.half * config.model_topo.processes)

    @property
    def days(self) -> float | None:
        """Of the whole run; None where the data are not known."""
        steps = self.basis.workload.steps
        return None if steps is None else steps * self.seconds / DAY

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(stage.memory.peak for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory; always, where nothing is known about it."""
        return self.basis.device.memory is None or self.peak <= self.basis.device.memory


def best_parts(basis: Basis) -> list[int]:
    """The best division; where none fits in memory, one that takes as little as there is."""
    return fitting_parts(basis) or _least_parts(basis)


def fitting_parts(basis: Basis) -> list[int] | None:
    """The best division that fits in memory, if any does."""
    if basis.device.memory is None:
        return _split(basis, lambda rank, ranges: True)
    return _split(basis, basis.memory.fits)


def _least_parts(basis: Basis) -> list[int]:
    """The best division within the least memory with which there is one."""
    peak = cache(lambda rank, ranges: basis.memory.rank(rank, ranges).peak)

    def within(memory: int) -> list[int] | None:
        return _split(basis, lambda rank, ranges: peak(rank, ranges) <= memory)

    assert basis.device.memory is not None, "without a limit every division fits"
    low = high = basis.device.memory
    found = None
    while found is None:
        low, high = high, high * 2
        found = within(high)
    while high - low > TOLERANCE * low:
        middle = (low + high) // 2
        leaner = within(middle)
        found, low, high = (found, middle, high) if leaner is None else (leaner, low, middle)
    return found


def _split(basis: Basis, fits: Fits) -> list[int] | None:
    count = basis.workload.micro_batches
    costs = [round(basis.times.layer(layer).of_step(count) / RESOLUTION) for layer in range(basis.spec.n_layers)]
    return best_split(costs, basis.config.model_topo.stages, fits, basis.config.v_schedule)

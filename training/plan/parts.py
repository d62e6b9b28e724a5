"""The best division of a run's layers: of those that fit in memory, the one with the fastest slowest rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property

from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.metrics.devices import Device, this_device
from training.plan.activation_memory import Saved
from training.plan.calibration import Calibration
from training.plan.costs import Factors, LayerTimes
from training.plan.memory import MemoryModel
from training.plan.partition import Fits, best_split
from training.plan.workload import Workload

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
    costs = whole_costs(basis.times, basis.spec.n_layers, basis.workload.micro_batches)
    return best_split(costs, basis.config.model_topo.stages, fits, basis.config.folded)


def whole_costs(times: LayerTimes, n_layers: int, micro_batches: int) -> list[int]:
    """Each layer's time in a step, in whole units of `RESOLUTION`."""
    return [round(times.layer(layer).of_step(micro_batches) / RESOLUTION) for layer in range(n_layers)]

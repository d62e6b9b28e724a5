"""`parts`: the config's own list, or, with `auto`, the division with the fastest slowest rank that fits in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch

from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.distributed.processes import agreed, gather
from training.plan.activation_memory import Saved
from training.plan.calibration import Calibration, Measured
from training.plan.costs import Estimate, Times
from training.plan.devices import Device, this_device
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
        calibration: measured times; estimated ones where absent.
        known: see `MemoryModel`.
    """

    config: TrainConfig
    spec: ModelSpec
    workload: Workload
    device: Device
    calibration: Calibration | None = None
    known: dict[tuple[object, ...], Saved] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def times(self) -> Times:
        estimate = Estimate(self.spec, self.config, self.workload, self.device)
        return Measured(estimate, self.calibration) if self.calibration else estimate

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.spec, self.config, self.workload, self.device, self.known)


def choose_parts(config: TrainConfig, spec: ModelSpec, workload: Workload | None = None) -> list[int]:
    """Layers per stage, checked. Where there are several processes, all call it together: rank 0 chooses for all.

    Args:
        workload: what the data are like; assumed where absent.

    Raises:
        ConfigError: the config and the model do not fit each other.
    """
    given = config.parts_for(spec.n_layers)
    if given is not None:
        return given
    if not torch.distributed.is_initialized():
        return _choose(config, spec, workload)
    chosen: list[int] = []
    with agreed():
        if torch.distributed.get_rank() == 0:
            chosen = _choose(config, spec, workload)
    return gather(chosen)[0]


def _choose(config: TrainConfig, spec: ModelSpec, workload: Workload | None) -> list[int]:
    if config.chunks == 1:
        return [spec.n_layers]
    calibration = Calibration.read(Path(config.save_path), config, spec)
    return best_parts(Basis(config, spec, workload or Workload.assumed(config), this_device(), calibration))


def best_parts(basis: Basis) -> list[int]:
    """The best division; where none fits in memory, one that takes as little as there is."""
    return fitting_parts(basis) or _least_parts(basis)


def fitting_parts(basis: Basis) -> list[int] | None:
    """The best division that fits in memory, if any does."""
    if basis.device.memory is None:
        return _split(basis, lambda rank, stretches: True)
    return _split(basis, basis.memory.fits)


def _least_parts(basis: Basis) -> list[int]:
    """The best division within the least memory with which there is one."""
    peak = cache(lambda rank, stretches: basis.memory.rank(rank, stretches).peak)

    def within(memory: int) -> list[int] | None:
        return _split(basis, lambda rank, stretches: peak(rank, stretches) <= memory)

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


def whole_costs(times: Times, n_layers: int, micro_batches: int) -> list[int]:
    """Each layer's time in a step, in whole units of `RESOLUTION`."""
    return [round(times.layer(layer).of_step(micro_batches) / RESOLUTION) for layer in range(n_layers)]


def costs_told(config: TrainConfig, spec: ModelSpec) -> str:
    """What `auto` goes by, for the log."""
    known = Calibration.read(Path(config.save_path), config, spec)
    return "measured costs, of --calibrate" if known else "estimated costs; --plan --calibrate measures them"

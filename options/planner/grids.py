"""List the grids of stages, replicas and what shares rows or layers that a number of devices can be divided into."""

from __future__ import annotations

from itertools import product
from typing import Literal

from options.planner.inputs import Basis
from training.config.deepspeed_config import check_sharing
from training.config.model_topo import ModelTopo
from training.errors import ConfigError

LONG = 4096  # least tokens of a row on each rank under sequence parallelism


def grids(basis: Basis, devices: int) -> list[ModelTopo]:
    """Return all (stages, replicas) grids for N devices, with tensor and sequence parallelism where they may help."""
    fabric, gpus = basis.fabric, basis.device.reserves
    found = []
    for stages, tensor in product(_divisors(devices), _divisors(devices)):
        if devices % (stages * tensor) or tensor > fabric.per_host:
            continue
        replicas = devices // (stages * tensor)
        for sequence in _divisors(replicas):
            if tensor * sequence == 1 or (gpus and basis.workload.longest >= LONG * sequence):
                tried = fabric.placed(_grid(basis.config.model_topo, stages, replicas, tensor, sequence))
                if _can_share(basis.changed(model_topo=tried)):
                    found.append(tried)
    return found


def _grid(topo: ModelTopo, stages: int, replicas: int, tensor: int, sequence: int) -> ModelTopo:
    """Spread a model, with `parts: auto`; processes of tensor parallelism are neighbours."""
    named = topo.process_topology
    axes: list[Literal["pipe", "data", "model"]] = [axis for axis in named.axes if axis != "model"]
    sizes = {"pipe": stages, "data": replicas, "model": tensor}
    if tensor > 1:
        axes.append("model")
    changed = named.model_copy(update={"dims": [sizes[axis] for axis in axes]})
    if axes != named.axes:
        changed = type(named).model_construct(set(named.model_fields_set), axes=axes, dims=changed.dims)
    experts = topo.experts if tensor > 1 else "columns"
    shared = {"sequence": sequence, "experts": experts}
    return topo.model_copy(update={"parts": None, "process_topology": changed, **shared})


def _can_share(basis: Basis) -> bool:
    """Say whether the model allows the config's tensor and sequence parallelism."""
    try:
        check_sharing(basis.config, basis.spec)
    except ConfigError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]

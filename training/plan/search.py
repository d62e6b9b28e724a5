"""The fastest ways to run that fit, of all sensible combinations of what a config says about how a run is spread.

Tried are all numbers of stages and replicas; on GPUs also processes that share layers, inside of a host, and, for long
rows, processes that share rows. Dividing the layers and walking through the schedule takes seconds for many stages; so
candidates come in the order of what a step would take if layers could be divided evenly, and once the next one would
take longer even so than the plans that are shown, the rest need not be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import floor, inf
from typing import Any, Literal

from tqdm import tqdm

from training.config.contradictions import contradictions
from training.config.deepspeed_config import check_shared_rows, check_tensor
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo
from training.errors import ConfigError
from training.plan.basis import Basis
from training.plan.costs import layer_times
from training.plan.optimizer_memory import StateBytes
from training.plan.plan import Plan, fitting_parts
from training.plan.workload import Workload
from training.schedule.simulation import simulate

SHOWN = 5  # of the fastest plans
SIZES = (1, 2, 4, 8, 16)  # rows in a micro-batch that are tried
LONG = 4096  # tokens of a row that a process has at least where rows are shared

Feed = Callable[[TrainConfig], Workload]


def search(basis: Basis, devices: int, feed: Feed | None = None, fixed: Container[str] = ()) -> list[Plan]:
    """The fastest dims, parts, micro-batch and schedule that fit; of equally fast ones those that need less memory.

    Args:
        feed: what a step has with another config; as many rows of the same length where absent.
        fixed: keys that stay as the config has them.
    """
    told: dict[tuple[int, ...], Workload] = {}

    def fed(candidate: Basis) -> Basis:
        config, topo = candidate.config, candidate.config.model_topo
        rows, least = config.train_micro_batch_size_per_gpu, config.least_micro_batches
        case = rows, least, topo.stages, topo.row_replicas, topo.sequence  # all that a loader depends on here
        if feed and case not in told:
            told[case] = feed(config)
        return replace(candidate, workload=told[case]) if feed else candidate

    candidates = [fed(each) for each in _candidates(basis, devices, fixed) if _has_room(each)]
    enough = [each for each in candidates if each.workload.micro_batches >= each.config.least_micro_batches]
    ordered = sorted((_even(each), number) for number, each in enumerate(enough))
    best: list[Plan] = []
    for least, number in tqdm(ordered, "search", disable=None, leave=False):  # None: only on a terminal
        within = best[-1].seconds if len(best) == SHOWN else inf
        if least > within:
            break
        if parts := enough[number].config.model_topo.parts or fitting_parts(enough[number], within):
            found = Plan(enough[number], parts)
            best = sorted([*best, *([found] if found.fits else [])], key=_rank)[:SHOWN]
    return best


def _rank(plan: Plan) -> tuple[float, int]:
    return round(plan.seconds, 9), plan.peak


def _candidates(basis: Basis, devices: int, fixed: Container[str]) -> Iterator[Basis]:
    """Every sensible combination."""
    config = basis.config
    tried: dict[str, Iterable[Any]] = {
        "model_topo": _grids(basis, devices),
        "train_micro_batch_size_per_gpu": SIZES,
        "schedule": ("1f1b", "dualpipev"),
        "use_grad_ckpt": (False, True),
    }
    for values in product(*([getattr(config, key)] if key in fixed else tried[key] for key in tried)):
        candidate = basis.changed(**dict(zip(tried, values, strict=True)))
        changed, topo = candidate.config, candidate.config.model_topo
        if changed.chunks > basis.spec.n_layers or any(contradictions(changed)):
            continue
        if candidate.schedule != changed.schedule and "schedule" not in fixed:  # one stage has nothing to wait for
            continue
        # Of several rows each had better be another replica's.
        if topo.sequence > 1 and changed.train_micro_batch_size_per_gpu > 1 and "model_topo" not in fixed:
            continue
        yield candidate


def _grids(basis: Basis, devices: int) -> list[ModelTopo]:
    """All ways to spread a model over so many devices."""
    fabric, gpus = basis.fabric, basis.device.reserves
    grids = []
    for stages, tensor in product(_divisors(devices), _divisors(devices)):
        if devices % (stages * tensor) or tensor > fabric.per_host:
            continue
        replicas = devices // (stages * tensor)
        for sequence in _divisors(replicas):
            if tensor * sequence == 1 or (gpus and basis.workload.longest >= LONG * sequence):
                tried = fabric.placed(grid(basis.config.model_topo, stages, replicas, tensor, sequence))
                grids += [tried] if _can_share(basis.changed(model_topo=tried)) else []
    return grids


def grid(topo: ModelTopo, stages: int, replicas: int, tensor: int = 1, sequence: int = 1) -> ModelTopo:
    """Over so many processes, with `parts: auto`; processes that share layers are neighbours."""
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
    """Whether the model's layers and rows can be shared by as many processes as the config says."""
    try:
        check_tensor(basis.config, basis.spec)
        check_shared_rows(basis.config, basis.spec)
    except ConfigError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _has_room(basis: Basis) -> bool:
    """Whether weights, gradients and states would fit if they could be divided evenly."""
    states = StateBytes.of(basis.config)
    held = sum(basis.parameters) * (states.weight + states.gradient + states.optimizer)
    return basis.device.memory is None or held <= basis.config.model_topo.stages * basis.device.memory


def _even(basis: Basis) -> float:
    """Seconds of a step if layers could be divided evenly."""
    times, topo, number = layer_times(basis), basis.config.model_topo, basis.micro_batches
    forward = sum(layer.forward.total for layer in times) / topo.stages
    backward = sum(layer.backward.total for layer in times) / topo.stages
    update = sum(layer.update.total for layer in times) / topo.stages
    if basis.schedule == "1f1b":
        return (number + topo.stages - 1) * (forward + backward) + update
    most = min(number, 4 * topo.stages)  # more only repeat the middle
    steps = _steps(topo.stages, most, floor(10 * backward / forward) / 10)
    return forward * steps + (number - most) * (forward + backward) + update


@cache
def _steps(stages: int, micro_batches: int, backward: float) -> float:
    """As how many forward passes of a stage a step of dualpipev takes, where a backward pass takes as so many."""
    chunks = 2 * stages
    return simulate("dualpipev", [0.5] * chunks, [backward / 2] * chunks, micro_batches).seconds

"""Plan changed configs: all that `--plan --search`, the advice of `--plan` and `--auto` try.

`search` tries all (stages, replicas) grids, micro-batches, schedules and recomputation; on GPUs also tensor parallelism
inside of a host and, for long rows, sequence parallelism. Splitting the layers and walking through the schedule takes
seconds for many stages; so candidates come in the order of a lower bound, the time of a step with evenly divided
layers, and the search ends where the next bound exceeds the plans that it found.

`savings` lists what makes a run need less memory, by what it costs: nothing, then time, then another training. `advise`
adds up these changes until the run fits; `give_up` yields the configs that `--auto` searches where nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import floor, inf
from typing import Any

from data.sample_set import SampleSet
from models.spec import ModelSpec
from options.planner.costs import layer_times
from options.planner.grids import LONG, grids
from options.planner.inputs import Basis, Workload
from options.planner.memory import StateBytes
from options.planner.own_plan import OwnPlan, own_planner, planners_for
from options.planner.plan import Plan, fitting_parts
from options.planner.progress import each_of
from options.planner.row_chunks import advised, can_chunk, chunk_of, fits_chunks, sizes_of
from options.planner.simulation import simulate
from options.row_chunks.keys import KEY
from training.batches import training_loader
from training.config.contradictions import PARAMETERS, of_optimizer
from training.config.keys import TrainConfig
from training.config.objective import LoraSection
from training.config.optimization import OptimizerOffload
from training.trained import with_trained

FASTEST = 5  # plans that a search returns
SIZES = (1, 2, 4, 8, 16)  # rows of a micro-batch that are tried
SHORTEST = 128  # least max_seq_len that is advised
COSTLY = ("optimizer.type", "max_seq_len")  # changes of what is trained
OFFLOADS = "zero_optimization.offload_optimizer: {device: cpu}", "offload_activations: true", "offload_gradients: true"

Feed = Callable[[TrainConfig], Workload]  # the workload of a config


def feed_of(dataset: SampleSet, spec: ModelSpec) -> Feed:
    """Return a function that measures the workload of these records with any config."""
    return lambda config: Workload.measured(training_loader(dataset, config, spec), config)


def search(basis: Basis, devices: int, feed: Feed | None = None, fixed: Container[str] = ()) -> list[Plan]:
    """Return the fastest plans that fit; of equally fast ones those with less memory first.

    Args:
        feed: workload of another config; as many rows of the same length where absent.
        fixed: keys that stay as the config has them.
    """
    workloads: dict[tuple[int, ...], Workload] = {}

    def fed(candidate: Basis) -> Basis:
        config, topo = candidate.config, candidate.config.model_topo
        rows, least = config.micro_batch_size, config.least_micro_batches
        case = rows, least, topo.stages, topo.row_replicas, topo.sequence  # all that a loader depends on here
        if feed and case not in workloads:
            workloads[case] = feed(config)
        return replace(candidate, workload=workloads[case]) if feed else candidate

    found = map(fed, filter(_may_fit, each_of(list(candidates(basis, devices, fixed)), "combinations")))
    enough = [each for each in found if each.workload.micro_batches >= each.config.least_micro_batches]

    # The most promising first: once the bound of one is above the time of the last to be returned, so are all others'.
    ordered = sorted((_lower_bound(candidate), number) for number, candidate in enumerate(enough))
    best: list[Plan] = []
    for bound, number in each_of(ordered, "plans"):
        within = best[-1].seconds if len(best) == FASTEST else inf
        if bound > within:
            break
        if parts := enough[number].config.model_topo.parts or fitting_parts(enough[number], within):
            plan = Plan(enough[number], parts)
            if plan.fits:
                best = sorted([*best, plan], key=speed)[:FASTEST]
    return best


def speed(plan: Plan) -> tuple[float, int]:
    """Sort plans: the fastest first, of equally fast ones those with less memory."""
    return round(plan.seconds, 9), plan.peak


def candidates(basis: Basis, devices: int, fixed: Container[str]) -> Iterator[Basis]:
    """Enumerate all sensible combinations."""
    config = basis.config
    tried: dict[str, Iterable[Any]] = {
        "model_topo": grids(basis, devices),
        "train_micro_batch_size_per_gpu": SIZES,
        "schedule": ("1f1b", "dualpipev"),
        "use_grad_ckpt": (False, True),
    }
    if can_chunk(config, basis.spec):
        tried[KEY] = (None, *sizes_of(basis.workload.longest, 2 * LONG)[::2])
    for values in product(*([getattr(config, key)] if key in fixed else tried[key] for key in tried)):
        candidate = basis.changed(**dict(zip(tried, values, strict=True)))
        changed, topo = candidate.config, candidate.config.model_topo
        if changed.chunks > basis.spec.n_layers or any(changed.contradictions()):
            continue
        if candidate.schedule != changed.schedule and "schedule" not in fixed:  # one stage has nothing to wait for
            continue
        # Several rows had better be several replicas'.
        if topo.sequence > 1 and changed.micro_batch_size > 1 and "model_topo" not in fixed:
            continue
        if chunk_of(changed) and changed.micro_batch_size > 1 and "train_micro_batch_size_per_gpu" not in fixed:
            continue
        yield candidate


def _may_fit(basis: Basis) -> bool:
    """Say whether weights, gradients and states would fit if they could be divided evenly."""
    states = StateBytes.of(basis.config)
    held = sum(basis.parameters) * states.weight + sum(basis.trained) * (states.gradient + states.optimizer)
    return held <= sum(device.memory or inf for device in basis.of_stages)


def _lower_bound(basis: Basis) -> float:
    """Return seconds of a step if layers could be divided evenly."""
    topo, number, forward, backward, update = basis.config.model_topo, basis.micro_batches, 0.0, 0.0, 0.0
    of_kinds = [layer_times(replace(basis, device=device)) for device in basis.device.kinds]
    for alike in zip(*of_kinds, strict=True):  # a layer on each kind of device
        forward += min(time.forward.total for time in alike)
        backward += min(time.backward.total for time in alike)
        update += min(time.update.total for time in alike)
    forward, backward, update = forward / topo.stages, backward / topo.stages, update / topo.stages
    if basis.schedule == "1f1b":
        return (number + (topo.stages - 1) / basis.row_chunks) * (forward + backward) + update
    most = min(number, 4 * topo.stages)  # more only repeat the middle
    passes = _dualpipev_passes(topo.stages, most, floor(10 * backward / forward) / 10)
    return forward * passes + (number - most) * (forward + backward) + update


@cache
def _dualpipev_passes(stages: int, micro_batches: int, backward: float) -> float:
    """DualPipeV step time, in forward passes of a stage; `backward` is the time of a backward pass, likewise."""
    chunks = 2 * stages
    return simulate("dualpipev", [0.5] * chunks, [backward / 2] * chunks, micro_batches).seconds


@dataclass(frozen=True)
class Advice:
    """A change of the config and its plans.

    Attributes:
        change: key and value.
        alone: with this change only.
        together: with it and all those before it; None for another way to train, which stands alone.
    """

    change: str
    alone: Plan | OwnPlan
    together: Plan | OwnPlan | None

    @property
    def best(self) -> Plan | OwnPlan:
        """The plan that counts."""
        return self.together or self.alone


def advise(basis: Basis) -> list[Advice]:
    """Return what makes a run fit, the cheapest first; what saves nothing is left out.

    First come changes that add up and cost time at most, until the run fits with them. Then other ways to train it,
    each alone; where none of them fits either, changes of what is trained; and at last more stages.
    """
    now, together = Plan.make(basis).peak, basis
    advice: list[Advice] = []

    def add(changes: Iterable[str]) -> bool:
        nonlocal together
        for change in each_of(list(changes), "changes"):
            changed, applied = cheaper(basis).get(change), cheaper(together).get(change)
            if not changed or not applied:  # the second is on top of the changes before
                continue
            before, together = Plan.make(together).peak, applied
            found = Advice(change, Plan.make(changed), Plan.make(applied))
            if found.alone.peak < now or found.best.peak < before:
                advice.append(found)
            if found.best.fits:
                return True
        return False

    changes = list(cheaper(basis))
    cheap = [change for change in changes if not change.startswith(COSTLY)]
    if add(cheap):
        return advice
    others = other_ways(basis) if basis.in_stages else []
    advice += others
    if not any(each.best.fits for each in others):
        add(change for change in changes if change not in cheap)
    if basis.in_stages and (plan := more_stages(basis)):
        dims = plan.basis.config.model_topo.process_topology.dims
        advice.append(Advice(f"model_topo.process_topology.dims: {dims}, parts: auto", plan, None))
    return advice


def other_ways(basis: Basis) -> list[Advice]:
    """List other ways to train the model, each alone: a schedule that plans itself, and adapters."""
    config = basis.config
    found = []
    for option in planners_for(config, basis.spec):
        plan = option.fastest(basis, config.model_topo.processes) if option is not own_planner(config) else None
        if plan:
            found.append(Advice(f"schedule: {option.schedule}", plan, None))
    if config.lora is None and not config.freeze:
        for lora in (LoraSection(), LoraSection(base="nf4")):
            adapted = config.model_copy(update={"lora": lora})
            # Other weights are trained, so nothing that is known of these layers holds.
            spec = adapted.train_beside(with_trained(basis.spec, adapted))
            changed = replace(basis.changed(lora=lora), spec=spec, known={})
            written = "{base: nf4}" if lora.base else "true"
            found.append(Advice(f"lora: {written}, which trains adapters", Plan.make(changed), None))
    return [each for each in found if each.alone.peak < Plan.make(basis).peak]


def next_change(plan: Plan, stage: int) -> tuple[str, int] | None:
    """Return the cheapest change with which a stage needs less memory, and its peak then."""
    found = ((change, Plan.make(basis).stages[stage].memory.peak) for change, basis in cheaper(plan.basis).items())
    return next(((change, peak) for change, peak in found if peak < plan.stages[stage].memory.peak), None)


def more_stages(basis: Basis) -> Plan | None:
    """Plan the fewest stages with which the run fits as it is, if there are such."""
    topo = basis.config.model_topo
    if basis.device.each:  # of which kind more of them would be, nobody has said
        return None
    more = range(topo.stages + 1, basis.spec.n_layers // (2 if basis.config.v_schedule else 1) + 1)
    for stages in each_of(more, "numbers of stages"):
        spread = topo.spread(stages, topo.replicas)
        changed = basis.changed(model_topo=spread)
        if fitting_parts(changed):
            return Plan.make(changed)
    return None


def give_up(config: TrainConfig, fixed: Container[str]) -> Iterator[TrainConfig]:
    """Yield the config, and what may fit where it does not: states, activations and gradients offloaded."""
    yield config
    for change in OFFLOADS:
        keys = dict(savings(config)).get(change, {})
        if not keys or any(key in fixed for key in keys):
            return
        config = config.model_copy(update=keys)
        yield config


def cheaper(basis: Basis) -> dict[str, Basis]:
    """Apply each of the `savings` alone, of those that suit the device and the optimizer."""
    suited = (
        (change, keys)
        for change, keys in savings(basis.config, basis.in_stages)
        if basis.device.reserves or change != OFFLOADS[1]
    )
    changed = {change: basis.changed(**keys) for change, keys in suited}
    return {change: each for change, each in changed.items() if _is_allowed(each)}


def _is_allowed(basis: Basis) -> bool:
    return not any(of_optimizer(basis.config)) and fits_chunks(basis.config, basis.spec)


def savings(config: TrainConfig, in_stages: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """List single changes that may save memory, the cheapest first: what to write, and the keys to change."""
    zero, topo = config.zero_optimization, config.model_topo

    def with_zero(**keys: object) -> dict[str, Any]:
        return {"zero_optimization": zero.model_copy(update=keys)}

    half = config.bf16.enabled or config.fp16.enabled
    if topo.parts is not None:
        yield "model_topo.parts: auto", {"model_topo": topo.spread(topo.stages, topo.replicas)}
    if zero.stage == 0 and topo.replicas > 1:
        yield "zero_optimization.stage: 1", with_zero(stage=1)
    for stage in () if in_stages or topo.replicas == 1 else range(max(2, zero.stage + 1), 4):
        yield f"zero_optimization.stage: {stage}", with_zero(stage=stage)
    if zero.stage == 1 and topo.replicas == 1 and not half and not zero.offloads:
        yield "zero_optimization.stage: 0", with_zero(stage=0)
    if config.micro_batch_size > 1:
        yield "train_micro_batch_size_per_gpu: 1", {"train_micro_batch_size_per_gpu": 1}
    yield from ((f"{KEY}: {chunk}", {KEY: chunk}) for chunk in advised(config, 2 * LONG))
    if not config.use_grad_ckpt:
        yield "use_grad_ckpt: true", {"use_grad_ckpt": True}
    if not zero.offloads and zero.stage:
        yield OFFLOADS[0], with_zero(offload_optimizer=OptimizerOffload(device="cpu"))
    if not config.offload_activations:
        yield OFFLOADS[1], {"offload_activations": True}
    if zero.offloads and not config.offload_gradients and in_stages:
        yield OFFLOADS[2], {"offload_gradients": True}
    if config.optimizer.type in ("AdamW", "Adam"):
        params = {name: value for name, value in config.optimizer.params.items() if name in PARAMETERS["Lion"]}
        lion = config.optimizer.model_copy(update={"type": "Lion", "params": params})
        yield "optimizer.type: Lion", {"optimizer": lion}
    length = config.max_seq_len // 2
    while length >= SHORTEST:
        yield f"max_seq_len: {length}", {"max_seq_len": length}
        length //= 2

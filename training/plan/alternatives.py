"""Other ways to run the same: what makes a run fit, and what is fastest on so many devices.

What to change comes the cheapest first: nothing lost, then time, then another training.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tqdm import tqdm

from training.config.keys import TrainConfig
from training.config.sections import OptimizerOffload
from training.plan.basis import Basis
from training.plan.plan import Plan, fitting_parts
from training.plan.workload import Workload

SHORTEST = 128  # tokens in a row that are advised
OFFLOAD = OptimizerOffload(device="cpu")
SHOWN = 5  # of the fastest plans
SIZES = (1, 2, 4, 8, 16)  # rows in a micro-batch that are tried


@dataclass(frozen=True)
class Advice:
    """A change of the config and what comes of it.

    Attributes:
        change: as it stands in the config.
        alone: the plan with this change only.
        together: the plan with this change and all those before it.
    """

    change: str
    alone: Plan
    together: Plan


def advise(basis: Basis) -> list[Advice]:
    """Changes up to the first with which, together with those before, the run fits."""
    advice = []
    together = basis
    for change, changed in _changes(basis):
        applied = dict(_changes(together)).get(change)  # to what the changes before made of the run
        if applied is None:
            continue
        together = applied
        advice.append(Advice(change, Plan.make(changed), Plan.make(together)))
        if advice[-1].together.fits:
            return advice
    return [*advice, *more_stages(basis)]


def next_change(plan: Plan, stage: int) -> tuple[str, int] | None:
    """The cheapest change with which a stage needs less memory, and the bytes that it then needs at most."""
    found = ((change, Plan.make(changed).stages[stage].memory.peak) for change, changed in _changes(plan.basis))
    return next(((change, peak) for change, peak in found if peak < plan.stages[stage].memory.peak), None)


def _changes(basis: Basis) -> Iterator[tuple[str, Basis]]:
    config = basis.config
    zero, topo = config.zero_optimization, config.model_topo

    def with_zero(**keys: object) -> Basis:
        return basis.changed(zero_optimization=zero.model_copy(update=keys))

    half = config.bf16.enabled or config.fp16.enabled
    if topo.parts is not None:
        yield "model_topo.parts: auto", basis.changed(model_topo=topo.spread(topo.stages, topo.replicas))
    if zero.stage == 0 and topo.replicas > 1:
        yield "zero_optimization.stage: 1", with_zero(stage=1)
    if zero.stage == 1 and topo.replicas == 1 and not half and not zero.offloads:
        yield "zero_optimization.stage: 0", with_zero(stage=0)
    if config.train_micro_batch_size_per_gpu > 1:
        yield "train_micro_batch_size_per_gpu: 1", basis.changed(train_micro_batch_size_per_gpu=1)
    if not config.use_grad_ckpt:
        yield "use_grad_ckpt: true", basis.changed(use_grad_ckpt=True)
    if not zero.offloads and zero.stage:
        yield "zero_optimization.offload_optimizer: {device: cpu}", with_zero(offload_optimizer=OFFLOAD)
    if config.optimizer.type in ("AdamW", "Adam"):
        yield "optimizer.type: Lion", basis.changed(optimizer=config.optimizer.model_copy(update={"type": "Lion"}))
    length = config.max_seq_len // 2
    while length >= SHORTEST:
        yield f"max_seq_len: {length}", _shorter(basis, length)
        length //= 2


def _shorter(basis: Basis, length: int) -> Basis:
    """Rows of at most so many tokens; as many of them as hold the same tokens."""
    work = basis.workload
    ratio = min(1.0, length / work.longest)
    workload = replace(
        work,
        length=work.length * ratio,
        longest=min(work.longest, length),
        attended=min(work.attended, length),
        micro_batches=max(1, round(work.micro_batches / ratio)),
    )
    return replace(basis, config=basis.config.model_copy(update={"max_seq_len": length}), workload=workload)


def more_stages(basis: Basis) -> list[Advice]:
    """The fewest stages with which the run fits as it is, if there are such."""
    topo = basis.config.model_topo
    for stages in range(topo.stages + 1, basis.spec.n_layers // (2 if basis.config.v_schedule else 1) + 1):
        spread = topo.spread(stages, topo.replicas)
        changed = basis.changed(model_topo=spread)
        if fitting_parts(changed):
            plan, dims = Plan.make(changed), spread.process_topology.dims
            return [Advice(f"model_topo.process_topology.dims: {dims}, parts: auto, alone", plan, plan)]
    return []


def search(
    basis: Basis, devices: int, feed: Callable[[TrainConfig], Workload] | None = None, fixed: Container[str] = ()
) -> list[Plan]:
    """The fastest dims, parts, micro-batch and schedule that fit; of equally fast ones those that need less memory.

    Args:
        feed: what a step has with another config; as many rows of the same length where absent.
        fixed: keys that stay as the config has them.
    """
    plans = []
    candidates = list(_candidates(basis, devices, fixed))
    for candidate in tqdm(candidates, "search", disable=None, leave=False):  # None: only on a terminal
        fed = replace(candidate, workload=feed(candidate.config)) if feed else candidate
        if fed.workload.micro_batches < fed.config.least_micro_batches:
            continue
        if parts := fed.config.model_topo.parts or fitting_parts(fed):
            plans.append(Plan(fed, parts))
    return sorted(filter(lambda plan: plan.fits, plans), key=lambda plan: (round(plan.seconds, 9), plan.peak))[:SHOWN]


def _candidates(basis: Basis, devices: int, fixed: Container[str]) -> Iterator[Basis]:
    """Every sensible combination."""
    config = basis.config
    divisors = (number for number in range(1, devices + 1) if devices % number == 0)
    tried: dict[str, Iterable[Any]] = {
        "model_topo": [config.model_topo.spread(stages, devices // stages) for stages in divisors],
        "train_micro_batch_size_per_gpu": SIZES,
        "schedule": ("1f1b", "dualpipev"),
        "use_grad_ckpt": (False, True),
    }
    for values in product(*([getattr(config, key)] if key in fixed else tried[key] for key in tried)):
        candidate = basis.changed(**dict(zip(tried, values, strict=True)))
        changed, topo = candidate.config, candidate.config.model_topo
        if changed.train_batch_size % (changed.train_micro_batch_size_per_gpu * topo.replicas):
            continue
        if changed.fp8.enabled and changed.schedule == "dualpipev":  # which the config would refuse
            continue
        if topo.parts and len(topo.parts) != changed.chunks:
            continue
        idle = changed.schedule != candidate.schedule and "schedule" not in fixed  # one stage has nothing to wait for
        if not idle and changed.chunks <= basis.spec.n_layers:
            yield candidate

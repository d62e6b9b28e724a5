"""Other ways to run the same, which make a run fit.

What to change comes the cheapest first: nothing lost, then time, then another training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.config.contradictions import PARAMETERS, of_optimizer
from training.config.sections import OptimizerOffload
from training.plan.basis import Basis
from training.plan.plan import Plan, fitting_parts

SHORTEST = 128  # tokens in a row that are advised
OFFLOAD = OptimizerOffload(device="cpu")


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
    """Those that the optimizer goes with."""
    return (each for each in _all_changes(basis) if not any(of_optimizer(each[1].config)))


def _all_changes(basis: Basis) -> Iterator[tuple[str, Basis]]:
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
        params = {name: value for name, value in config.optimizer.params.items() if name in PARAMETERS["Lion"]}
        lion = config.optimizer.model_copy(update={"type": "Lion", "params": params})
        yield "optimizer.type: Lion", basis.changed(optimizer=lion)
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

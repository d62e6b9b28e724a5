"""A plan for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from training.plan.advice import Advice
from training.plan.plan import Plan, StagePlan

GB = 1e9


def stages_table(plan: Plan) -> Table:
    """Layers, parameters, memory and time of each stage."""
    offloaded = any(stage.memory.host for stage in plan.stages)
    shape = ", V schedule" if plan.basis.config.v_schedule else ""
    made = Table(title=f"{len(plan.stages)} stages of {plan.parts}{shape}, memory in GB")
    headings = ["stage", "layers", "parameters", "weights", "gradients", "optimizer", "activations", "step", "peak"]
    for heading in [*headings, *(["main memory"] if offloaded else []), "time"]:
        made.add_column(heading, justify="right")
    slowest = max(stage.seconds for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        memory = stage.memory
        sizes = [memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.step, memory.peak]
        made.add_row(
            str(number),
            layer_ranges(stage),
            f"{stage.parameters:,}",
            *(f"{size / GB:.2f}" for size in [*sizes, *([memory.host] if offloaded else [])]),
            f"{stage.seconds / slowest:.0%}",
        )
    return made


def layer_ranges(stage: StagePlan) -> str:
    """The layers that a stage holds, such as 0..4."""
    return " + ".join(f"{begin}..{end - 1}" if end - begin > 1 else str(begin) for begin, end in stage.ranges)


def facts(plan: Plan) -> list[str]:
    """What the plan comes to, and what it rests on."""
    basis, device = plan.basis, plan.basis.device
    work, config = basis.workload, basis.config
    lines = [
        f"data: {work.source}",
        f"a step: {plan.micro_batches} micro-batches of {work.rows} x {work.length:.0f} tokens a replica, "
        f"{work.supervised:.0%} of them supervised; {config.schedule}",
        f"bubble: {plan.bubble:.1%} of the devices' time",
    ]
    if config.bf16.enabled and not device.bf16:
        lines.append(f"warning: {device.name} does not compute in bf16; expected fp16")
    if basis.calibration:
        lines.append(f"times: measured on {basis.calibration.device} by --calibrate")
    elif device.known:
        lines.append(f"times: estimated, at {device.efficiency:.0%} of the peak of {device.name}")
    else:
        lines.append("times: in proportion only; --devices or --calibrate make seconds of them")
    if basis.calibration or device.known:
        mfu = "" if plan.mfu is None else f", {plan.mfu:.0%} MFU"
        lines.append(f"speed: {plan.seconds:.2f} s a step, {plan.tokens_per_s:,.0f} tokens/s{mfu}")
        if plan.days is not None:
            duration = f"{plan.days:.1f} days" if plan.days >= 1 else f"{plan.days * 24:.1f} hours"
            lines.append(f"the whole run: {work.steps} steps, {duration}")
    lines.append(memory_line(plan))
    return lines


def memory_line(plan: Plan) -> str:
    """Whether it fits."""
    memory = plan.basis.device.memory
    if memory is None:
        return f"memory: at most {plan.peak / GB:.2f} GB a process; nothing known limits it"
    word = "fits" if plan.fits else "does not fit"
    return f"memory: {word}: at most {plan.peak / GB:.2f} GB of {memory / GB:.2f} GB that may be planned with"


def advice_table(advice: Sequence[Advice], now: Plan) -> Table:
    """What to change, alone and together with what stands above it."""
    made = Table(title="what would make it fit, cheapest first")
    for heading in ("change", "peak alone, GB", "with those above, GB", "fits", "step time"):
        made.add_column(heading, justify="left" if heading == "change" else "right")
    for each in advice:
        made.add_row(
            each.change,
            f"{each.alone.peak / GB:.2f}",
            f"{each.together.peak / GB:.2f}",
            "yes" if each.together.fits else "alone" if each.alone.fits else "no",
            f"x {each.together.seconds / now.seconds:.2f}",
        )
    return made


def search_table(plans: Sequence[Plan]) -> Table:
    """The best combinations."""
    made = Table(title="fastest first")
    headings = ("dims", "parts", "micro-batch", "schedule", "use_grad_ckpt", "bubble", "peak, GB", "tokens/s", "MFU")
    for heading in headings:
        made.add_column(heading, justify="right")
    for plan in plans:
        config = plan.basis.config
        made.add_row(
            str(config.model_topo.process_topology.dims),
            str(plan.parts),
            str(config.train_micro_batch_size_per_gpu),
            config.schedule,
            str(config.use_grad_ckpt).lower(),
            f"{plan.bubble:.1%}",
            f"{plan.peak / GB:.2f}",
            f"{plan.tokens_per_s:,.0f}",
            "" if plan.mfu is None else f"{plan.mfu:.0%}",
        )
    return made

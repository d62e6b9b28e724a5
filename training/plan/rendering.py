"""A plan for people: tables, lines, and a picture of what fills each stage's memory and how long each works."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Column, Table

from training.distributed.links import FILE as LINKS_FILE
from training.metrics.devices import TERA
from training.plan.alternatives import Advice
from training.plan.basis import MEASURED_FILE
from training.plan.plan import WITH_PEERS, Plan

GB = 1e9
PICTURE = "plan.png"
DPI = 120


def stages_table(plan: Plan) -> Table:
    """Layers, parameters, memory and time of each stage."""
    offloaded = any(stage.memory.host for stage in plan.stages)
    shape = ", V schedule" if plan.basis.config.v_schedule else ""
    headings = ["stage", "layers", "parameters", "weights", "gradients", "optimizer", "activations", "step", "peak"]
    headings += ["main memory", "time"] if offloaded else ["time"]
    made = _table(f"{len(plan.stages)} stages of {plan.parts}{shape}, memory in GB", headings)
    slowest = max(stage.seconds for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        memory = stage.memory
        sizes = [memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.step, memory.peak]
        made.add_row(
            str(number),
            " + ".join(f"{begin}..{end - 1}" if end - begin > 1 else str(begin) for begin, end in stage.ranges),
            f"{stage.parameters:,}",
            *(f"{size / GB:.2f}" for size in [*sizes, *([memory.host] if offloaded else [])]),
            f"{stage.seconds / slowest:.0%}",
        )
    return made


def times_table(plan: Plan) -> Table:
    """What each stage's part of a step is made of, in shares of the step; kinds of work that there are none of are left
    out, and waiting includes the messages."""
    every = [vars(stage.spent) for stage in plan.stages]
    kinds = [kind for kind in every[0] if any(spent[kind] for spent in every)]
    made = _table("what the time of a step is made of", ["stage", *kinds, "waiting"])
    for number, spent in enumerate(every):
        shares = [spent[kind] / plan.seconds for kind in kinds]
        made.add_row(str(number), *(f"{share:.1%}" for share in [*shares, max(0.0, 1 - sum(shares))]))
    return made


def facts(plan: Plan) -> list[str]:
    """What the plan comes to, and what it rests on."""
    basis, device = plan.basis, plan.basis.device
    work, config = basis.workload, basis.config
    lines = [
        f"data: {work.source}",
        f"a step: {basis.micro_batches} micro-batches of {work.rows} x {work.length:.0f} tokens a replica, "
        f"{work.supervised:.0%} of them supervised; {config.schedule}",
        f"bubble: {plan.bubble:.1%} of the devices' time",
    ]
    if config.model_topo.tensor > 1:
        lines.append(f"warning: {WITH_PEERS}")
    if config.bf16.enabled and not device.bf16:
        lines.append(f"warning: {device.name} does not compute in bf16; expected fp16")
    if basis.in_fp8:
        lines.append(f"products of the blocks: fp8, at best {device.fp8 / TERA:,.0f} TFLOP/s; MFU is of bf16's peak")
    elif config.fp8.enabled:
        lines.append(f"warning: {device.name} does not compute in fp8; expected fp8.enabled: false, as planned here")
    if basis.measured:
        first, last = basis.measured.steps
        lines.append(f"times and peaks: corrected by what steps {first} to {last} took ({MEASURED_FILE})")
    elif basis.calibration:
        lines.append(f"times: measured on {basis.calibration.device} by --calibrate")
    elif device.known:
        products = f"{device.products:.0%} of the peak for large products, {device.bandwidth / TERA:.2f} TB/s of memory"
        lines.append(f"times: estimated, a roofline of {device.name}: {products}")
    else:
        lines.append("times: in proportion only; --devices or --calibrate make seconds of them")
    if links := basis.measured_links:
        lines.append(f"links: measured by --check on {' and '.join(dict.fromkeys(links.hosts))} ({LINKS_FILE})")
    if basis.measured or basis.calibration or device.known:
        mfu = "" if plan.mfu is None else f", {plan.mfu:.0%} MFU"
        lines.append(f"speed: {plan.seconds:.2f} s a step, {plan.tokens_per_s:,.0f} tokens/s{mfu}")
        if plan.days is not None:
            duration = f"{plan.days:.1f} days" if plan.days >= 1 else f"{plan.days * 24:.1f} hours"
            lines.append(f"the whole run: {work.steps} steps, {duration}")
    peak = f"at most {plan.peak / GB:.2f} GB"
    if device.memory is None:
        return [*lines, f"memory: {peak} a process; nothing known limits it"]
    word = "fits" if plan.fits else "does not fit"
    return [*lines, f"memory: {word}: {peak} of {device.memory / GB:.2f} GB that may be planned with"]


def advice_table(advice: Sequence[Advice], now: Plan) -> Table:
    """What to change, alone and together with what stands above it."""
    headings = ["change", "peak alone, GB", "with those above, GB", "fits", "step time"]
    made = _table("what would make it fit, cheapest first", headings)
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
    headings = ["dims", "parts", "micro-batch", "schedule", "use_grad_ckpt", "bubble", "peak, GB", "tokens/s", "MFU"]
    made = _table("fastest first", headings)
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


def draw(plan: Plan, path: Path) -> Path:
    """The picture as a PNG."""
    from matplotlib.figure import Figure  # takes a second

    stages = range(len(plan.stages))
    memory = [stage.memory for stage in plan.stages]
    figure = Figure(figsize=(max(7.0, 1.5 + 0.35 * len(stages)), 6), dpi=DPI, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    bottom = [0.0] * len(memory)
    layers = {
        "weights": [each.weights for each in memory],
        "gradients": [each.gradients for each in memory],
        "optimizer": [each.optimizer for each in memory],
        "activations or step": [max(each.activations, each.step) for each in memory],
    }
    for label, sizes in layers.items():
        heights = [size / GB for size in sizes]
        above.bar(stages, heights, bottom=bottom, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    limit = plan.basis.device.memory
    if limit is not None:
        above.axhline(limit / GB, color="black", linewidth=0.8, linestyle="--", label=plan.basis.device.name)
    above.set_ylabel("peak memory, GB")
    above.legend(fontsize="small")
    above.set_title(f"{plan.basis.spec.family.name}, parts {plan.parts}", fontsize="medium", wrap=True)
    slowest = max(stage.seconds for stage in plan.stages)
    below.bar(stages, [stage.seconds / slowest for stage in plan.stages], color="tab:gray")
    below.set_ylabel("time, of the slowest stage")
    below.set_xlabel("stage")
    figure.savefig(path, format="png")
    return path


def _table(title: str, headings: Sequence[str]) -> Table:
    """Columns of numbers, on the right, but for that of changes."""
    columns = [Column(heading, justify="left" if heading == "change" else "right") for heading in headings]
    return Table(*columns, title=title)

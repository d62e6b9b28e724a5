"""A plan for people: tables, lines, and a picture of what fills each stage's memory and how long each works."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Column, Table

from training.distributed.links import FILE as LINKS_FILE
from training.metrics.devices import TERA
from training.plan.alternatives import Advice
from training.plan.basis import MEASURED_FILE
from training.plan.plan import ERROR, Plan
from training.plan.sharing import of_step

GB = 1e9
PICTURE = "plan.png"
DPI = 120


def stages_table(plan: Plan) -> Table:
    """Layers, parameters, memory and time of each stage."""
    shape = ", V schedule" if plan.basis.config.v_schedule else ""
    headings = ["stage", "layers", "parameters", "weights", "gradients", "optimizer", "activations", "step", "peak"]
    sent = [of_step(plan.basis, stage.layers).sent(plan.basis.config.model_topo) for stage in plan.stages]
    columns: dict[str, list[float]] = {"main memory": [stage.memory.host for stage in plan.stages]}
    for heading, of_stages in zip(("exchanges", "all-reduces"), zip(*sent, strict=True), strict=True):
        columns[heading] = [plan.basis.micro_batches * size for size in of_stages]
    more = {heading: sizes for heading, sizes in columns.items() if any(sizes)}
    headings += [*more, "time"]
    what = "memory, and what a process sends in a step," if any(map(any, sent)) else "memory"
    made = _table(f"{len(plan.stages)} stages of {plan.parts}{shape}, {what} in GB", headings)
    slowest = max(stage.seconds for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        memory = stage.memory
        sizes = [memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.step, memory.peak]
        made.add_row(
            str(number),
            " + ".join(f"{begin}..{end - 1}" if end - begin > 1 else str(begin) for begin, end in stage.ranges),
            f"{stage.parameters:,}",
            *(f"{size / GB:.2f}" for size in [*sizes, *(column[number] for column in more.values())]),
            f"{stage.seconds / slowest:.0%}",
        )
    return made


def times_table(plan: Plan) -> Table:
    """What each stage's part of a step is made of, in shares of the step; kinds of work that there are none of are left
    out, and waiting includes the messages."""
    every = [vars(stage.spent) for stage in plan.stages]
    kinds = [kind for kind in every[0] if any(spent[kind] for spent in every)]
    headings = ["stage", *(kind.replace("_", "-") for kind in kinds), "waiting"]
    made = _table("what the time of a step is made of", headings)
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
    if basis.in_fp8:
        lines.append(f"products of the blocks: fp8, at best {device.fp8 / TERA:,.0f} TFLOP/s; MFU is of bf16's peak")
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
    lines += _sent(plan)
    if links := basis.measured_links:
        lines.append(f"links: measured by --check on {' and '.join(dict.fromkeys(links.hosts))} ({LINKS_FILE})")
    if basis.measured or basis.calibration or device.known:
        mfu = "" if plan.mfu is None else f", {plan.mfu:.0%} MFU"
        lines.append(f"speed: {plan.seconds:.2f} s a step, {plan.tokens_per_s:,.0f} tokens/s{mfu}")
        if plan.days is not None:
            duration = f"{plan.days:.1f} days" if plan.days >= 1 else f"{plan.days * 24:.1f} hours"
            lines.append(f"the whole run: {work.steps} steps, {duration}")
    peak = f"at most {plan.peak / GB:.2f} GB of tensors"
    if device.memory is None:
        return [*lines, f"memory: {peak} a process; nothing known limits it"]
    word = "fits" if plan.fits else "does not fit"
    return [*lines, f"memory: {word}: {peak} of {device.memory / GB:.2f} GB that may be planned with"]


def _sent(plan: Plan) -> list[str]:
    """Which links messages take, and how many of them processes send each other that share rows or layers."""
    basis, topo, fabric = plan.basis, plan.basis.config.model_topo, plan.basis.fabric
    lines = []
    if basis.named:
        ends = zip(fabric.name.split(","), (fabric.inside, fabric.between), strict=True)
        links = [f"{name} ({link.bandwidth / GB:.3g} GB/s, {1e6 * link.latency:.1f} us)" for name, link in ends]
        lines.append(f"links: {links[0]} among the {fabric.per_host} GPUs of a host, {links[1]} from host to host")
    elif topo.processes > fabric.per_host and basis.device.reserves and not basis.measured_links:
        lines.append("links: all processes as if on one host; --links nvlink4,ib400 names those between hosts")
    block = of_step(basis, [1])
    for group, sizes, sent, what in (
        (fabric.sharing_rows(topo), block.exchanged, block.sent(topo)[0], "exchanges of heads for tokens"),
        (fabric.sharing_layers(topo), block.summed, block.sent(topo)[1], "all-reduces of hidden states"),
    ):
        if sizes:
            where = "on one host" if group.hosts == 1 else f"over {group.hosts} hosts"
            of = f"{len(sizes)} {what}, for which a process sends {sent / GB:.3f} GB"
            lines.append(f"a block and micro-batch: {of}; among {group.size} {where}")
    return lines


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
    shared = any(plan.basis.config.model_topo.sequence > 1 for plan in plans)
    axes = list(dict.fromkeys(", ".join(plan.basis.config.model_topo.process_topology.axes) for plan in plans))
    headings = ["dims", *(["axes"] if axes != ["pipe, data"] else []), *(["sequence"] if shared else [])]
    headings += ["parts", "micro-batch", "schedule", "use_grad_ckpt", "bubble", "peak, GB", "tokens/s", "MFU"]
    tight = f"; *: less than {ERROR:.0%} of the memory is left, and a plan may err by as much"
    made = _table(f"fastest first{tight if any(plan.is_tight for plan in plans) else ''}", headings)
    for plan in plans:
        config = plan.basis.config
        topo = config.model_topo
        made.add_row(
            str(topo.process_topology.dims),
            *([", ".join(topo.process_topology.axes)] if "axes" in headings else []),
            *([str(topo.sequence)] if shared else []),
            str(plan.parts),
            str(config.train_micro_batch_size_per_gpu),
            config.schedule,
            str(config.use_grad_ckpt).lower(),
            f"{plan.bubble:.1%}",
            f"{plan.peak / GB:.2f}{'*' if plan.is_tight else ''}",
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

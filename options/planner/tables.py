"""A plan as tables and lines."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from rich.table import Column, Table

from common.quantities import GIGA, counted, duration, gigabytes
from options.planner import zero
from options.planner.communication import stage_messages
from options.planner.inputs import Basis
from options.planner.links import FILE as LINKS_FILE
from options.planner.measurements import MEASURED_FILE
from options.planner.own_plan import OwnPlan
from options.planner.plan import ERROR, Plan
from options.planner.row_chunks import chunk_of
from options.planner.search import Advice
from training.metrics.devices import TERA

MEMORY = "weights gradients optimizer activations step peak".split()  # columns of a plan, and of `StageMemory`

WHOLE = "whole rows"


def stages_table(plan: Plan) -> Table:
    """Show layers, parameters, memory and time of each stage."""
    basis, memory = plan.basis, [stage.memory for stage in plan.stages]
    columns = {name: list(map(attrgetter(name), memory)) for name in MEMORY}

    # Columns of nothing but zeros are left out.
    sent = [stage_messages(basis, stage.layers).sent(basis.config.model_topo) for stage in plan.stages]
    exchanges = [basis.micro_batches * exchanged for exchanged, _ in sent]
    all_reduces = [basis.micro_batches * reduced for _, reduced in sent]
    more: dict[str, list[float]] = {
        "main memory": [each.host for each in memory],
        "exchanges": exchanges,
        "all-reduces": all_reduces,
    }
    columns |= {heading: sizes for heading, sizes in more.items() if any(sizes)}

    what = "memory, and messages of a process in a step," if any([*exchanges, *all_reduces]) else "memory"
    shape = ", V schedule" if basis.config.v_schedule else ""
    kinds = ["device"] if basis.device.each else []
    headings = ["stage", *kinds, "layers", "parameters", *columns, "time"]
    made = _table(f"{counted(len(plan.stages), 'stage')} of {plan.parts}{shape}, {what} in GB", headings)
    slowest = max(stage.seconds for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        made.add_row(
            str(number),
            *(stage.device.name for _ in kinds),
            " + ".join(f"{begin}..{end - 1}" if end - begin > 1 else str(begin) for begin, end in stage.ranges),
            f"{stage.parameters:,}",
            *(f"{sizes[number] / GIGA:.2f}" for sizes in columns.values()),
            f"{stage.seconds / slowest:.0%}",
        )
    return made


def times_table(plan: Plan) -> Table:
    """Show each stage's time by kind of work, in shares of the step; waiting includes the messages between stages."""
    every = [vars(stage.spent) for stage in plan.stages]
    kinds = [kind for kind in every[0] if any(spent[kind] for spent in every)]
    made = _table("share of step time", ["stage", *(kind.replace("_", "-") for kind in kinds), "waiting"])
    for number, spent in enumerate(every):
        shares = [spent[kind] / plan.seconds for kind in kinds]
        made.add_row(str(number), *(f"{share:.1%}" for share in [*shares, max(0.0, 1 - sum(shares))]))
    return made


def plan_summary(plan: Plan) -> list[str]:
    """Summarize the plan and its assumptions in lines."""
    basis, device = plan.basis, plan.basis.device
    work, config = basis.workload, basis.config
    a_step = f"{counted(basis.micro_batches, 'micro-batch')} of {counted(work.rows, 'row')}"
    lines = [
        f"data: {work.source}",
        f"step: {a_step} x {work.length:.0f} tokens a replica, {work.supervised:.0%} of them supervised; "
        f"{config.schedule if basis.in_stages else 'no pipeline'}",
        *_chunks(basis),
        *_images(basis),
        f"bubble: {plan.bubble:.1%} of the devices' time" if basis.in_stages else zero.describe_sharing(basis),
    ]

    if basis.in_fp8:
        lines.append(f"products of the blocks: fp8, at best {device.fp8 / TERA:,.0f} TFLOP/s; MFU is of bf16's peak")
    if basis.measured:
        first, last = basis.measured.steps
        lines.append(f"times and peaks: corrected by steps {first}-{last} ({MEASURED_FILE})")
    elif basis.calibration:
        lines.append(f"times: measured on {basis.calibration.device} by --calibrate")
    elif device.known:
        for kind in device.kinds:
            products = f"{kind.products:.0%} of the peak for large products, {kind.bandwidth / TERA:.2f} TB/s of memory"
            lines.append(f"times: estimated, a roofline of {kind.name}: {products}")
    else:
        lines.append("times: in proportion only; --devices or --calibrate make seconds of them")

    lines += _links(plan)
    if plan.knows_seconds:
        lines.append(f"speed: {speed(plan)}")
        if work.steps:
            lines.append(f"the whole run: {counted(work.steps, 'step')}, {duration(work.steps * plan.seconds)}")
    return [*lines, *config.objective.unplanned(), f"memory: {room(plan)}"]


def _chunks(basis: Basis) -> list[str]:
    """Say in what chunks the longest rows pass, if they do."""
    cuts = basis.longest_chunks
    if len(cuts) == 1:
        return []
    return [f"rows: at most {sum(cuts):,} tokens, in {len(cuts)} chunks of {min(cuts):,} to {max(cuts):,}"]


def _images(basis: Basis) -> list[str]:
    """Say how many images a micro-batch has, if any."""
    images = basis.workload.images
    if not images.number:
        return []
    most = f"at most {images.most:,} tokens of them"
    return [f"images: {images.number:.3g} a micro-batch, of {images.tokens:,.0f} tokens each; {most}"]


def speed(plan: Plan) -> str:
    """Say how fast a step is by plan."""
    mfu = "" if plan.mfu is None else f", {plan.mfu:.0%} MFU"
    return f"{duration(plan.seconds)} a step, {plan.tokens_per_s:,.0f} tokens/s{mfu}"


def room(plan: Plan) -> str:
    """Say whether the plan fits; what a process holds besides its tensors is not planned."""
    full = plan.fullest
    peak, memory = f"at most {gigabytes(full.memory.peak)} of tensors", full.device.memory
    where = f" on stage {plan.stages.index(full)}" if plan.basis.device.each else ""
    if memory is None:
        return f"{peak} and kernels a process, which holds Python and its libraries too; no known limit"
    return f"{'fits' if plan.fits else 'does not fit'}: {peak} of {gigabytes(memory)} usable{where}"


def _links(plan: Plan) -> list[str]:
    """Describe links, and the messages of sequence and tensor parallelism."""
    basis, topo, fabric = plan.basis, plan.basis.config.model_topo, plan.basis.fabric
    lines = []
    if links := basis.measured_links:
        lines.append(f"links: measured by --check on {' and '.join(dict.fromkeys(links.hosts))} ({LINKS_FILE})")
    elif basis.named:
        ends = zip(fabric.name.split(","), (fabric.inside, fabric.between), strict=True)
        inside, between = (f"{name} ({x.bandwidth / GIGA:.3g} GB/s, {1e6 * x.latency:.1f} us)" for name, x in ends)
        lines.append(f"links: {inside} among the {fabric.per_host} GPUs of a host, {between} from host to host")
    elif topo.processes > fabric.per_host and basis.device.reserves:
        lines.append("links: all processes as if on one host; --links nvlink4,ib400 names those between hosts")
    block = stage_messages(basis, [1])
    for ranks, sizes, sent, what in (
        (topo.sharing("rows"), block.exchanged, block.sent(topo)[0], "exchanges of heads for tokens"),
        (topo.sharing("layers"), block.summed, block.sent(topo)[1], "all-reduces of hidden states"),
    ):
        if sizes:
            group = fabric.group(ranks)
            where = "on one host" if group.hosts == 1 else f"over {group.hosts} hosts"
            of = f"{len(sizes)} {what}, for which a process sends {sent / GIGA:.3f} GB"
            lines.append(f"a block and micro-batch: {of}; among {group.size} {where}")
    return lines


def advice_table(advice: Sequence[Advice], now: Plan | OwnPlan) -> Table:
    """Show changes, alone and together with those above."""
    headings = ["change", "peak alone, GB", "with those above, GB", "fits", "step time"]
    made = _table("changes that make it fit, cheapest first", headings)
    for each in advice:
        fits = "alone" if each.alone.fits else "no"
        if each.best.fits:
            fits = "yes"
        together = f"{each.together.peak / GIGA:.2f}" if each.together else ""
        step_time = f"x {each.best.seconds / now.seconds:.2f}"
        made.add_row(each.change, f"{each.alone.peak / GIGA:.2f}", together, fits, step_time)
    return made


def needs_table(plan: OwnPlan, basis: Basis) -> Table:
    """Show what a plan needs beside what is there."""
    device, made = basis.device, _table("memory in GB", ["of", "needed", "there", "short"])
    rows = (f"each {device.name}", plan.peak, device.memory), ("a host", plan.host, basis.main_memory)
    for what, needed, there in rows:
        short = f"{(needed - there) / GIGA:.2f}" if there and needed > there else ""
        made.add_row(what, f"{needed / GIGA:.2f}", f"{there / GIGA:.2f}" if there else "not known", short)
    return made


def search_table(plans: Sequence[Plan]) -> Table:
    """Show the fastest plans."""
    rows = []
    for plan in plans:
        config, topo = plan.basis.config, plan.basis.config.model_topo
        rows.append(
            {
                "dims": str(topo.process_topology.dims),
                "axes": ", ".join(topo.process_topology.axes),
                "sequence": str(topo.sequence),
                "parts": str(plan.parts),
                "micro-batch": str(config.micro_batch_size),
                "row_chunk": str(chunk_of(config) or WHOLE),
                "schedule": config.schedule,
                "use_grad_ckpt": str(config.use_grad_ckpt).lower(),
                "bubble": f"{plan.bubble:.1%}",
                "peak, GB": f"{plan.peak / GIGA:.2f}{'*' if plan.is_tight else ''}",
                "tokens/s": f"{plan.tokens_per_s:,.0f}",
                "MFU": "" if plan.mfu is None else f"{plan.mfu:.0%}",
            }
        )

    # Columns are left out where they say nothing.
    usual = {"axes": "pipe, data", "sequence": "1", "row_chunk": WHOLE}
    headings = [heading for heading in rows[0] if {row[heading] for row in rows} != {usual.get(heading)}]
    tight = f"; *: less than {ERROR:.0%} of the memory is left, and a plan may err by as much"
    made = _table(f"fastest first{tight if any(plan.is_tight for plan in plans) else ''}", headings)
    for row in rows:
        made.add_row(*(row[heading] for heading in headings))
    return made


def _table(title: str, headings: Sequence[str]) -> Table:
    """Make a table with numbers on the right and changes on the left."""
    columns = [Column(heading, justify="left" if heading == "change" else "right") for heading in headings]
    return Table(*columns, title=title)

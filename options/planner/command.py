"""Entry point of `--plan`, of both scripts, and a plan as tables, lines and a picture.

It needs no GPU, and of the model only config.json. The exit code is 0 when the run fits and 1 when it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Column, Table

from common.log import Log
from common.quantities import GIGA, counted, duration, gigabytes
from common.terminal import reason_of
from data.errors import DataError
from data.tokenized.dataset import Dataset
from models.api import read_spec
from models.checkpoint.hub import find_model
from models.checkpoint.publish import writing
from models.errors import CheckpointError
from models.spec import ModelSpec
from options.planner import zero
from options.planner.communication import PER_HOST, Fabric, stage_messages
from options.planner.inputs import MEASURED_FILE, Basis, Workload
from options.planner.micro_batch import ROWS, choose_rows
from options.planner.own_plan import SelfPlannedOption, own_planner, self_planned
from options.planner.plan import ERROR, Plan
from options.planner.search import Advice, Feed, advise, feed_of, search
from options.planner.shapes import shape_of
from options.planner.timing import calibrate
from training.config.deepspeed_config import check_device, check_fp8, check_length, check_sharing
from training.config.deepspeed_keys import describe_ignored_keys
from training.config.gpu import check_gpu, check_numbers
from training.config.keys import TrainConfig
from training.data_setup import RecordReader
from training.distributed.links import FILE as LINKS_FILE
from training.errors import ConfigError
from training.metrics.devices import TERA, parse_devices, this_device
from training.trained import with_trained

DOES_NOT_FIT = 1
WIDTH = 160  # columns of a plan that is written to a file
PICTURE = "plan.png"
MEMORY = "weights gradients optimizer activations step peak".split()  # columns of a plan, and of `StageMemory`
DPI = 120
STEP = "the optimizer's step,\nwhere it needs more\nthan activations"
DRAWN = {name: name for name in MEMORY[:4]} | {
    "step": STEP,
    "beyond": "kernels, and what was\nmeasured on top",
}  # of plan.png, from below


def plan_run(config: TrainConfig, arguments: argparse.Namespace, in_stages: bool = True) -> None:
    """Print the plan, draw it into the run's folder, and exit with 1 where it does not fit.

    Args:
        in_stages: whether of a pipeline; else of plain ZeRO.

    Raises:
        ConfigError, CheckpointError: config, model or devices are unusable.
    """
    log = Log(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    shape = shape_of(config.model_path)
    folder = Path(config.model_path) if shape else find_model(config.model_path, weights=False)
    spec = with_trained(read_spec(folder, shape[1] if shape else None), config)

    check_device(config)
    count, device = parse_devices(arguments.devices) if arguments.devices else (None, this_device())
    if arguments.devices:
        check_numbers(config, device.name, device.ampere, device.fp8 > 0)
    else:
        check_gpu(config)
    check_fp8(config, spec)
    check_length(config, spec)

    fabric = None
    if count and not arguments.search:
        config = _spread(config, count)
    if arguments.links:
        fabric = Fabric.named(arguments.links, device, arguments.per_host or PER_HOST)
        config = config.model_copy(update={"model_topo": fabric.placed(config.model_topo)})
    if not arguments.search:
        check_sharing(config, spec)

    workload, feed = (Workload.assumed(config), Workload.assumed) if shape else _feed(config, spec, folder, log)
    if config.train_micro_batch_size_per_gpu == "auto" and not arguments.search:
        rows, line = choose_rows(config, spec, device, feed, in_stages)
        log.print(line)
        config = config.model_copy(update={ROWS: rows})
        workload = feed(config)

    if arguments.calibrate:
        if arguments.devices and not torch.cuda.is_available():
            raise ConfigError("--calibrate: this machine has no GPU to measure; expected no --devices")
        log.print(f"calibrated: {calibrate(config, spec, workload).write(Path(config.save_path))}")

    # Measurements on this machine do not hold for other devices, unless the user says that they are the same.
    here = arguments.calibrate or not arguments.devices
    basis, ignored = Basis.of_run(config, spec, workload, device, calibrated=here)
    basis = replace(basis, named=fabric, in_stages=in_stages)

    processes = count or config.model_topo.processes
    where = f"{processes} x {device.name}" if device.memory else f"{counted(processes, 'process')} on a {device.name}"
    log.print(f"model: {spec.family.name}, {spec.n_layers} layers; {where}")
    known = [f"model_path: {folder}: not found; planned by the known shape of {shape[0]}, full rows"] if shape else []
    for line in [*known, *ignored, *describe_ignored_keys(config, in_stages, plan=True)]:
        log.print(line)
    _show(basis, processes, feed if arguments.search else None, log)


def _show(basis: Basis, processes: int, feed: Feed | None, log: Console) -> None:
    """Show the plan of a config, or with `feed` the fastest plans; exit with 1 where none fits."""
    own = own_planner(basis.config)
    if own and not feed:
        sys.exit(0 if _show_own(own, basis, basis.config.model_topo.stages, log) else DOES_NOT_FIT)
    if feed:
        for option in self_planned(basis.config):
            _show_own(option, basis, processes, log)
        best = search(basis, processes, feed)
        if not best:
            log.print("search: no pipeline fits, whatever the dims and the micro-batch")
            sys.exit(DOES_NOT_FIT)
        log.print(search_table(best))
    plan = best[0] if feed else Plan.make(basis)
    show(plan, log)
    if not plan.fits:
        log.print(advice_table(advise(basis), plan))
        sys.exit(DOES_NOT_FIT)


def _show_own(option: SelfPlannedOption[Any], basis: Basis, devices: int, log: Console) -> bool:
    """Show the fastest plan of a schedule that plans itself; return whether one fits."""
    plan = option.fastest(basis, devices)
    for line in plan.describe() if plan else [f"{option.schedule.replace('_', ' ')}: does not fit"]:
        log.print(line)
    return plan is not None


def show(plan: Plan, log: Console) -> None:
    """Print a plan, and draw it into the run's folder."""
    log.print(stages_table(plan))
    log.print(times_table(plan))
    for line in plan_summary(plan):
        log.print(line)
    save_path = Path(plan.basis.config.save_path)
    with writing(save_path):
        save_path.mkdir(parents=True, exist_ok=True)
        log.print(f"drawn: {draw_plan(plan, save_path / PICTURE)}")


def _spread(config: TrainConfig, count: int) -> TrainConfig:
    """Spread a config without dims over `count` devices, a stage on each."""
    topo = config.model_topo
    if count == topo.processes:
        return config
    if "process_topology" in topo.model_fields_set:
        raise ConfigError(
            f"--devices: {count} of them, but model_topo.process_topology.dims {topo.process_topology.dims} ask for "
            f"{topo.processes}; expected as many, or --search"
        )
    return config.model_copy(update={"model_topo": topo.spread(count, 1)})


def _feed(config: TrainConfig, spec: ModelSpec, folder: Path, log: Console) -> tuple[Workload, Feed]:
    """Measure the workload, and those of other configs, from the records where they can be read, else assume them."""
    if not config.windows_key:
        try:
            dataset, _ = RecordReader(config, folder, Console(quiet=True)).read_sets()
            assert isinstance(dataset, Dataset)
            feed = feed_of(dataset, spec)
            return feed(config), feed
        except (DataError, CheckpointError, OSError, ValueError) as error:
            log.print(f"data_path is not used: {reason_of(error)}")
    return Workload.assumed(config), Workload.assumed


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
    headings = ["stage", "layers", "parameters", *columns, "time"]
    made = _table(f"{counted(len(plan.stages), 'stage')} of {plan.parts}{shape}, {what} in GB", headings)
    slowest = max(stage.seconds for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        made.add_row(
            str(number),
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
        products = f"{device.products:.0%} of the peak for large products, {device.bandwidth / TERA:.2f} TB/s of memory"
        lines.append(f"times: estimated, a roofline of {device.name}: {products}")
    else:
        lines.append("times: in proportion only; --devices or --calibrate make seconds of them")

    lines += _links(plan)
    if plan.knows_seconds:
        lines.append(f"speed: {_speed(plan)}")
        if work.steps:
            lines.append(f"the whole run: {counted(work.steps, 'step')}, {duration(work.steps * plan.seconds)}")
    return [*lines, *config.objective.unplanned(), f"memory: {_room(plan)}"]


def _speed(plan: Plan) -> str:
    mfu = "" if plan.mfu is None else f", {plan.mfu:.0%} MFU"
    return f"{duration(plan.seconds)} a step, {plan.tokens_per_s:,.0f} tokens/s{mfu}"


def _room(plan: Plan) -> str:
    """Say whether the plan fits; what a process holds besides its tensors is not planned."""
    peak, memory = f"at most {gigabytes(plan.peak)} of tensors", plan.basis.device.memory
    if memory is None:
        return f"{peak} and kernels a process, which holds Python and its libraries too; no known limit"
    return f"{'fits' if plan.fits else 'does not fit'}: {peak} of {gigabytes(memory)} usable"


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


def advice_table(advice: Sequence[Advice], now: Plan) -> Table:
    """Show changes, alone and together with those above."""
    headings = ["change", "peak alone, GB", "with those above, GB", "fits", "step time"]
    made = _table("changes that make it fit, cheapest first", headings)
    for each in advice:
        fits = "alone" if each.alone.fits else "no"
        if each.together.fits:
            fits = "yes"
        made.add_row(
            each.change,
            f"{each.alone.peak / GIGA:.2f}",
            f"{each.together.peak / GIGA:.2f}",
            fits,
            f"x {each.together.seconds / now.seconds:.2f}",
        )
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
                "schedule": config.schedule,
                "use_grad_ckpt": str(config.use_grad_ckpt).lower(),
                "bubble": f"{plan.bubble:.1%}",
                "peak, GB": f"{plan.peak / GIGA:.2f}{'*' if plan.is_tight else ''}",
                "tokens/s": f"{plan.tokens_per_s:,.0f}",
                "MFU": "" if plan.mfu is None else f"{plan.mfu:.0%}",
            }
        )

    usual = {"axes": "pipe, data", "sequence": "1"}  # columns that are left out where they say nothing
    headings = [heading for heading in rows[0] if {row[heading] for row in rows} != {usual.get(heading)}]
    tight = f"; *: less than {ERROR:.0%} of the memory is left, and a plan may err by as much"
    made = _table(f"fastest first{tight if any(plan.is_tight for plan in plans) else ''}", headings)
    for row in rows:
        made.add_row(*(row[heading] for heading in headings))
    return made


def draw_plan(plan: Plan, path: Path) -> Path:
    """Draw memory and time of the stages as a PNG."""
    from matplotlib.figure import Figure  # takes a second
    from matplotlib.ticker import MaxNLocator

    basis, device = plan.basis, plan.basis.device
    of_stages = [stage.memory for stage in plan.stages]
    memory = {name: numpy.array(list(map(attrgetter(name), of_stages))) / GIGA for name in DRAWN}
    # Activations and what the step needs are never in memory together.
    stepping = memory["step"] > memory["activations"]
    memory["activations"] = numpy.where(stepping, 0.0, memory["activations"])
    memory["step"] = numpy.where(stepping, memory["step"], 0.0)

    stages, bottom = numpy.arange(len(plan.stages)), numpy.zeros(len(plan.stages))
    figure = Figure(figsize=(max(9.0, 4.0 + 0.35 * len(stages)), 6), dpi=DPI, layout="constrained")

    above, below = figure.subplots(2, 1, sharex=True)
    for name, heights in memory.items():
        if heights.any():
            above.bar(stages, heights, bottom=bottom, label=DRAWN[name])
        bottom += heights
    if device.memory is not None:
        usable = f"{device.name}: {gigabytes(device.memory)} usable"
        above.axhline(device.memory / GIGA, color="black", linewidth=0.8, linestyle="--", label=usable)
    above.set_ylabel("peak of a process, GB")

    unit = 1.0 if plan.knows_seconds else plan.seconds
    times, step = [stage.seconds / unit for stage in plan.stages], plan.seconds / unit
    below.bar(stages, times, color="tab:gray", label="a stage's own work in a step")
    below.axhline(step, color="tab:red", linewidth=0.8, label=f"the whole step; bubble {plan.bubble:.1%}")
    below.set_ylabel("time, s" if plan.knows_seconds else "time, of the step")
    below.set_xlabel("stage")
    below.set_xlim(-0.75, len(stages) - 0.25)
    below.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

    for panel, top in ((above, max(bottom.max(), (device.memory or 0) / GIGA)), (below, step)):
        panel.set_ylim(0, 1.05 * top)
        panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    lines = [f"{basis.spec.family.name}, {counted(len(stages), 'stage')} of {plan.parts}", f"memory: {_room(plan)}"]
    lines += [f"speed: {_speed(plan)}"] if plan.knows_seconds else []
    figure.suptitle("\n".join(lines), fontsize="medium", wrap=True)
    figure.savefig(path, format="png")
    return path


def _table(title: str, headings: Sequence[str]) -> Table:
    """Make a table with numbers on the right and changes on the left."""
    columns = [Column(heading, justify="left" if heading == "change" else "right") for heading in headings]
    return Table(*columns, title=title)

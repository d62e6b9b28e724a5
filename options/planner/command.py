"""Do `--plan`, of both entry points.

It needs no GPU, and of the model only config.json. The exit code is 0 when the run fits and 1 when it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from common.log import Log
from common.quantities import GIGA, counted
from common.terminal import reason_of
from data.errors import DataError
from data.tokenized.dataset import Dataset
from models.api import read_spec
from models.checkpoint.hub import find_model
from models.checkpoint.publish import writing
from models.errors import CheckpointError
from models.spec import ModelSpec
from options.planner.chunk_sizes import choose_chunk
from options.planner.communication import PER_HOST, Fabric
from options.planner.drawing import draw_plan, place_of_picture
from options.planner.inputs import Basis, Workload
from options.planner.micro_batch import ROWS, choose_rows
from options.planner.own_plan import SelfPlannedOption, own_planner, planners_for
from options.planner.plan import Plan
from options.planner.progress import searching
from options.planner.search import Feed, advise, feed_of, other_ways, search
from options.planner.shapes import shape_of
from options.planner.tables import advice_table, needs_table, plan_summary, search_table, stages_table, times_table
from options.planner.timing import calibrate
from options.row_chunks.keys import KEY
from training.config.deepspeed_config import check_device, check_fp8, check_length, check_sharing
from training.config.deepspeed_keys import describe_ignored_keys
from training.config.gpu import check_gpu, check_numbers
from training.config.keys import TrainConfig
from training.data_setup import RecordReader
from training.errors import ConfigError
from training.metrics.devices import Device, devices_here, parse_devices
from training.option import model_for
from training.trained import check_start, with_trained

DOES_NOT_FIT = 1
WIDTH = 160  # columns of a plan that is written to a file


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
    count, device = None, devices_here(config.model_topo.processes)
    if arguments.devices:
        count, device = parse_devices(arguments.devices)
        for kind in device.kinds:
            check_numbers(config, kind.name, kind.ampere, kind.fp8 > 0)
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
    if not shape:
        _check_other_models(config, spec, folder, log)

    assumed = spec, Workload.assumed(config), Workload.assumed
    spec, workload, feed = assumed if shape else _feed(config, spec, folder, log)
    if not shape:
        check_start(config, spec)  # with eyes, whose adapters it may have
    main_memory = _main_memory(arguments)
    choosers = (ROWS, partial(choose_rows, main_memory=main_memory)), (KEY, choose_chunk)
    for key, choose in () if arguments.search else choosers:
        if getattr(config, key, None) == "auto":
            chosen, line = choose(config, spec, device, feed, in_stages)
            log.print(line)
            config = config.model_copy(update={key: chosen})
            workload = feed(config)

    if arguments.calibrate:
        _check_calibration(arguments, device)
        log.print(f"calibrated: {calibrate(config, spec, workload).write(Path(config.save_path))}")

    # Measurements on this machine do not hold for other devices, unless the user says that they are the same.
    here = arguments.calibrate or not arguments.devices
    basis, ignored = Basis.of_run(config, spec, workload, device, calibrated=here)
    basis = replace(basis, named=fabric, in_stages=in_stages, main_memory=main_memory)

    processes = count or config.model_topo.processes
    where = device.counted(processes) if device.memory else f"{counted(processes, 'process')} on a {device.name}"
    log.print(f"model: {spec.family.name}, {spec.n_layers} layers; {where}")
    known = [f"model_path: {folder}: not found; planned by the known shape of {shape[0]}, full rows"] if shape else []
    for line in [*known, *ignored, *describe_ignored_keys(config, in_stages, plan=True)]:
        log.print(line)
    with searching(log):
        _show(basis, processes, feed if arguments.search else None, log)


def _main_memory(arguments: argparse.Namespace) -> int | None:
    """Return the bytes of a host's memory: those named, else this host's; of other devices' hosts nobody knows."""
    if arguments.host_memory:
        return int(arguments.host_memory * GIGA)
    return None if arguments.devices else psutil.virtual_memory().total


def _check_calibration(arguments: argparse.Namespace, device: Device) -> None:
    """Refuse to measure here what a plan is not for."""
    if device.each:
        raise ConfigError(f"--calibrate: measures one kind of device, and the plan is for {device.name}")
    if arguments.devices and not torch.cuda.is_available():
        raise ConfigError("--calibrate: this machine has no GPU to measure; expected no --devices")


def _show(basis: Basis, processes: int, feed: Feed | None, log: Console) -> None:
    """Show the plan of a config, or with `feed` the fastest plans; exit with 1 where none fits."""
    own = own_planner(basis.config)
    if own and not feed:
        sys.exit(0 if _show_own(own, basis, basis.config.model_topo.stages, log) else DOES_NOT_FIT)
    if feed:
        best = search(basis, processes, feed)
        for option in planners_for(basis.config, basis.spec):
            _show_own(option, basis, processes, log, drawn=not best)
        if not best:
            log.print("search: no pipeline fits, whatever the dims and the micro-batch")
            sys.exit(DOES_NOT_FIT)
        log.print(search_table(best))
    plan = best[0] if feed else Plan.make(basis)
    show(plan, log)
    if not plan.fits:
        log.print(advice_table(advise(basis), plan))
        sys.exit(DOES_NOT_FIT)


def _show_own(
    option: SelfPlannedOption[Any],
    basis: Basis,
    devices: int,
    log: Console,
    drawn: bool = True,
) -> bool:
    """Show the fastest plan of a schedule that plans itself, or the smallest; return whether it fits.

    Args:
        drawn: whether the run's picture is of it.
    """
    plan, name = option.fastest(basis, devices), option.schedule.replace("_", " ")
    if plan is None:
        log.print(f"{name}: the model cannot be divided among {counted(devices, 'device')}")
        return False

    log.print(needs_table(plan, basis))
    for line in plan.describe():
        log.print(line)
    if drawn:
        _draw(plan.draw, basis.config, log)
    if plan.fits:
        return True
    log.print(f"{name}: does not fit")
    log.print(advice_table([each for each in other_ways(basis) if each.best.fits], plan))
    return False


def show(plan: Plan, log: Console) -> None:
    """Print a plan, and draw it."""
    log.print(stages_table(plan))
    log.print(times_table(plan))
    for line in plan_summary(plan):
        log.print(line)
    _draw(partial(draw_plan, plan), plan.basis.config, log)


def _draw(draw: Callable[[Path], Path], config: TrainConfig, log: Console) -> None:
    """Draw a plan into the run's folder, or here."""
    picture, why = place_of_picture(config)
    with writing(picture.parent):
        picture.parent.mkdir(parents=True, exist_ok=True)
        log.print(f"drawn: {draw(picture)}{why}")


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


def _check_other_models(config: TrainConfig, spec: ModelSpec, folder: Path, log: Log) -> None:
    """Refuse a model beside the trained one that does not fit, as the run would; one that is not here is named."""
    try:
        config.objective.other_models(spec, folder, read_spec, weights=False)
    except (CheckpointError, DataError) as error:
        log.print(f"not compared: {reason_of(error)}")


def _feed(config: TrainConfig, spec: ModelSpec, folder: Path, log: Console) -> tuple[ModelSpec, Workload, Feed]:
    """Measure the workload, and those of other configs, from the records where they can be read, else assume them.

    Returns:
        The model as it is trained on them, with eyes where there are images, and the workloads.
    """
    if not config.windows_key:
        try:
            dataset, _ = RecordReader(config, folder, Console(quiet=True)).read_sets()
            assert isinstance(dataset, Dataset)
            feed = feed_of(dataset, spec)
            workload = feed(config)
        except (DataError, CheckpointError, OSError, ValueError) as error:
            log.print(f"data_path is not used: {reason_of(error)}")
        else:
            return model_for(config, spec, [dataset]), workload, feed
    return spec, Workload.assumed(config), Workload.assumed

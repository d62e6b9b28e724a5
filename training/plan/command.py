"""`train_ds.py --config F --plan`: no GPU is needed, and of the model nothing but config.json.

The exit code is 0 when the run fits and 1 when it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from common.log import Log
from common.terminal import reason_of
from data.errors import DataError
from data.tokenized.dataset import Dataset
from models.api import read_spec
from models.checkpoint.layout import resolve
from models.checkpoint.publish import writing
from models.errors import CheckpointError
from models.spec import ModelSpec
from training.config.deepspeed_config import (
    check_device,
    check_fp8,
    check_shared_rows,
    check_tensor,
    router_loss_weight,
)
from training.config.gpu import check_gpu, check_numbers
from training.config.keys import TrainConfig
from training.config.passed_on import unheeded
from training.data_setup import RecordReader, build_loader
from training.errors import ConfigError
from training.metrics.devices import parse_devices, this_device
from training.plan.alternatives import advise
from training.plan.basis import Basis
from training.plan.calibration import calibrate
from training.plan.fabric import PER_HOST, Fabric
from training.plan.plan import Plan
from training.plan.rendering import PICTURE, advice_table, draw, facts, search_table, stages_table, times_table
from training.plan.search import search
from training.plan.workload import Workload

DOES_NOT_FIT = 1
WIDTH = 160  # of a plan that is written to a file


def plan_run(config: TrainConfig, arguments: argparse.Namespace) -> None:
    """Print the plan, draw it into the run's folder, and leave with 1 where it does not fit.

    Raises:
        ConfigError, CheckpointError: the config, the model or the devices make no run.
    """
    log = Log(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    folder = resolve(config.model_path)
    spec = read_spec(folder)
    check_device(config)
    count, device = parse_devices(arguments.devices) if arguments.devices else (None, this_device())
    if arguments.devices:
        check_numbers(config, device.name, device.ampere, device.fp8 > 0)
    else:
        check_gpu(config)
    check_fp8(config, spec)
    config, fabric = _on(config, count, arguments.search), None
    if arguments.links:
        fabric = Fabric.named(arguments.links, device, arguments.per_host or PER_HOST)
        config = config.model_copy(update={"model_topo": fabric.placed(config.model_topo)})
    if not arguments.search:
        check_tensor(config, spec)
        check_shared_rows(config, spec)
    workload, feed = _feed(config, spec, folder, log)
    save_path = Path(config.save_path)
    if arguments.calibrate:
        if arguments.devices and not torch.cuda.is_available():
            raise ConfigError("--calibrate: this machine has no GPU to measure; expected no --devices")
        log.print(f"calibrated: {calibrate(config, spec, workload).write(save_path)}")
    # What was measured here says nothing about other devices, unless somebody says that they are the same.
    counts = arguments.calibrate or not arguments.devices
    basis, told = Basis.of_run(config, spec, workload, device, calibrated=counts)
    basis = replace(basis, named=fabric)
    processes = count or config.model_topo.processes
    on = f"{processes} x {device.name}" if device.memory else f"{processes} processes on a {device.name}"
    log.print(f"model: {spec.family.name}, {spec.n_layers} layers; {on}")
    for line in [*told, *unheeded(config, plan=True)]:
        log.print(line)
    if arguments.search:
        best = search(basis, processes, feed)
        if not best:
            log.print("nothing fits, whatever the dims and the micro-batch")
            sys.exit(DOES_NOT_FIT)
        log.print(search_table(best))
        plan = best[0]
    else:
        plan = Plan.make(basis)
    show(plan, log)
    if not plan.fits:
        log.print(advice_table(advise(basis), plan))
        sys.exit(DOES_NOT_FIT)


def show(plan: Plan, log: Console) -> None:
    """Print a plan, and draw it into the run's folder."""
    log.print(stages_table(plan))
    log.print(times_table(plan))
    for line in facts(plan):
        log.print(line)
    save_path = Path(plan.basis.config.save_path)
    with writing(save_path):
        save_path.mkdir(parents=True, exist_ok=True)
        log.print(f"drawn: {draw(plan, save_path / PICTURE)}")


def _on(config: TrainConfig, count: int | None, searches: bool) -> TrainConfig:
    """The config on so many devices: as many stages, where it says nothing of dims."""
    topo = config.model_topo
    if count is None or count == topo.processes or searches:
        return config
    if "process_topology" in topo.model_fields_set:
        raise ConfigError(
            f"--devices: {count} of them, but model_topo.process_topology.dims {topo.process_topology.dims} ask for "
            f"{topo.processes}; expected as many, or --search"
        )
    return config.model_copy(update={"model_topo": topo.spread(count, 1)})


def _feed(
    config: TrainConfig, spec: ModelSpec, folder: Path, log: Console
) -> tuple[Workload, Callable[[TrainConfig], Workload]]:
    """What a step has with this config, and with others: as the records are, where they can be read; else assumed."""
    if config.stream_gb:
        return Workload.assumed(config), Workload.assumed
    try:
        dataset, _ = RecordReader(config, folder, Console(quiet=True)).read_sets()
        assert isinstance(dataset, Dataset)
        feed = feed_of(dataset, spec)
        return feed(config), feed
    except (DataError, CheckpointError, OSError, ValueError) as error:
        log.print(f"data_path is not used: {reason_of(error)}")
        return Workload.assumed(config), Workload.assumed


def feed_of(dataset: Dataset, spec: ModelSpec) -> Callable[[TrainConfig], Workload]:
    """What a step on these records has, with any config."""

    def feed(config: TrainConfig) -> Workload:
        router_loss = router_loss_weight(config, spec) > 0
        loader = build_loader(dataset, config, config.dataloader_drop_last, router_loss=router_loss)
        return Workload.measured(loader, config)

    return feed

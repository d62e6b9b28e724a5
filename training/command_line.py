"""What both training doors do with their command line.

torch and all that takes seconds to import is imported once the config is checked: a mistake is told at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.keys import TrainConfig
from training.distributed import processes
from training.distributed.processes import Place
from training.distributed.script import in_processes
from training.errors import ConfigError, keep_tracebacks_in, one_line_at_the_end
from training.launch.agent import RUN
from training.launch.hosts import read_hostfile
from training.launch.start import launch, name_accelerator

if TYPE_CHECKING:
    from training.distributed.rank_monitor import RankMonitor


def parse_arguments(description: str) -> argparse.Namespace:
    """The words after the door's name."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--hostfile", metavar="FILE", help="train on several machines: lines such as node1 slots=8")
    parser.add_argument("--include", default="", metavar="node1@node2:0,1", help="of the hostfile only these")
    parser.add_argument("--exclude", default="", metavar="node1@node2:0,1", help="of the hostfile all but these")
    parser.add_argument("--inspect", type=int, default=0, metavar="N", help="print the first N samples and leave")
    parser.add_argument("--html", metavar="FILE", help="with --inspect: write them as a page instead")
    parser.add_argument("--plan", action="store_true", help="say what the run will take in memory and time, and leave")
    parser.add_argument("--devices", metavar="8xA100-40G", help="with --plan: the devices; this machine's otherwise")
    parser.add_argument("--search", action="store_true", help="with --plan: propose dims, parts, micro-batch, schedule")
    parser.add_argument("--calibrate", action="store_true", help="with --plan: measure the layers here first")
    parser.add_argument("--prove", action="store_true", help="show by a small run that it trains right here, and leave")
    parser.add_argument("--check", action="store_true", help="compare the hosts, measure their links, and leave")
    parser.add_argument("--record", metavar="FOLDER", help=argparse.SUPPRESS)  # where a rank of a proof notes its steps
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override keys of the config")
    arguments = parser.parse_intermixed_args()
    if sum(map(bool, (arguments.inspect, arguments.plan, arguments.prove, arguments.check))) > 1:
        parser.error("--inspect, --plan, --prove and --check: expected one of them")
    if (arguments.include or arguments.exclude) and not arguments.hostfile:
        parser.error("--include and --exclude need --hostfile")
    if arguments.html and not arguments.inspect:
        parser.error("--html needs --inspect N")
    if (arguments.devices or arguments.search or arguments.calibrate) and not arguments.plan:
        parser.error("--devices, --search and --calibrate need --plan")
    return arguments


def open_door(
    arguments: argparse.Namespace,
    load: Callable[[Place | None], TrainConfig],
    run: Callable[[TrainConfig, Place, RankMonitor], bool],
    plan: Callable[[TrainConfig, argparse.Namespace], None] | None = None,
    prove: Callable[[TrainConfig], None] | None = None,
) -> None:
    """Inspect the data, plan, prove, start the launcher, or be one rank of a run.

    Args:
        arguments: see `parse_arguments`.
        load: gives the checked config.
        run: the whole job of one rank; whether to start over.
        plan: what `--plan` does, where the door can.
        prove: what `--prove` does, the same.
    """

    def with_override(word: str) -> TrainConfig:
        arguments.overrides.append(word)
        try:
            return load(None)
        finally:
            arguments.overrides.pop()

    place = Place.from_environment()
    if place is not None:
        processes.end_with_launcher(place)
    with one_line_at_the_end(place.rank if place else None):
        hosts = None
        if arguments.hostfile and RUN not in os.environ:
            if place is not None:
                raise ConfigError(f"--hostfile: starts the processes itself; expected python {Path(sys.argv[0]).name}")
            hosts = read_hostfile(arguments.hostfile, arguments.include, arguments.exclude)
        config = load(Place(0, sum(map(len, hosts.values())), 0, 1) if hosts else place)
        keep_tracebacks_in(config.save_path)
        if arguments.plan:
            if plan is None:
                raise ConfigError("--plan: plans pipelines; expected train_ds.py")
            if place is None or place.rank == 0:
                plan(config, arguments)
        elif arguments.prove:
            if prove is None:
                raise ConfigError("--prove: proves pipelines; expected train_ds.py")
            if place is not None:
                raise ConfigError("--prove: starts processes of its own, on this machine; expected python train_ds.py")
            name_accelerator()
            prove(config)
        elif arguments.inspect:
            inspect(config, arguments.inspect, arguments.html)
        elif hosts:
            launch(config, hosts, with_override)
        else:
            in_processes(config, place, run)


def inspect(config: TrainConfig, count: int, html: str | None = None) -> None:
    """Print the first samples as they would be trained, or write them as a page."""
    from common.log import Log
    from data.inspection import summary
    from data.inspection.inspect import show_samples, show_tools, write_page
    from models.checkpoint.layout import resolve
    from training.data_setup import RecordReader

    console = Log()
    reader = RecordReader(config, resolve(config.model_path), console)
    dataset = reader.stream().windows.peek() if config.stream_gb else reader.read("data", config.data_path)
    console.print(summary.table(dataset), highlight=False)
    warnings = [f"warning: {each}" for each in summary.warnings(dataset, config.max_seq_len)]
    console.print("\n".join([*summary.facts(dataset, config.max_seq_len), *warnings]), highlight=False)
    samples = dataset.samples[:count]
    if html:
        write_page(samples, reader.tokenizer, html, title=f"Samples of {Path(config.save_path).name}")
        console.print(f"{len(samples)} samples in {html}")
    else:
        show_samples(samples, reader.tokenizer, console)
        show_tools(reader.tokenizer, reader.prompts, console)

"""The command line of train_ds.py and train_ds_zero.py.

torch takes seconds to import, so it is imported after the config is checked: config errors are reported immediately.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common import early_signals
from common.terminal import typed_name
from models.checkpoint.hub import find_model
from options.planner.shapes import shape_of
from training.config.keys import ALIASES, TrainConfig
from training.distributed import processes
from training.distributed.processes import ProcessInfo
from training.distributed.script import run_or_launch
from training.errors import ConfigError, exit_with_one_line, keep_tracebacks_in
from training.launch.agent import RUN
from training.launch.hosts import read_hostfile
from training.launch.start import Hosts, launch, name_accelerator
from training.metrics.devices import KNOWN, parse_devices
from training.option import options_of

if TYPE_CHECKING:
    from training.distributed.rank_monitor import RankMonitor

ACTIONS = ("inspect", "plan", "prove")  # in place of training
# Options without effect unless another one is given.
NEEDED = {"dry_run": "auto", "include": "hostfile", "exclude": "hostfile", "html": "inspect", "search": "plan"}
NEEDED |= {"calibrate": "plan", "links": "plan", "per_host": "links"}


def make_parser(kind: type[TrainConfig], description: str = "", in_stages: bool = True) -> argparse.ArgumentParser:
    """Make the parser, with the flags of the options of `kind`; without a pipeline, hide those that need one."""

    def staged(text: str) -> str:
        return text if in_stages else argparse.SUPPRESS

    parser = argparse.ArgumentParser(prog=typed_name(), description=description)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", help="YAML file of the run")
    which.add_argument("--auto", action="store_true", help=staged("choose a config for --model and --data, and train"))
    parser.add_argument("--model", metavar="DIR", help=staged("with --auto: the model's folder or hub name"))
    parser.add_argument("--data", metavar="FILE", nargs="+", help=staged("with --auto: files or folders of records"))
    parser.add_argument("--save", metavar="DIR", help=staged("with --auto: the run's folder; resumes a run in it"))
    parser.add_argument("--dry-run", action="store_true", help=staged("with --auto: write and show the config alone"))
    parser.add_argument("--hostfile", metavar="FILE", help="train on several machines: lines such as node1 slots=8")
    parser.add_argument("--include", default="", metavar="node1@node2:0,1", help="use only these of the hostfile")
    parser.add_argument("--exclude", default="", metavar="node1@node2:0,1", help="use all but these of the hostfile")
    parser.add_argument(
        "--inspect", type=_count, metavar="N", help="print N samples and one of each other type, and exit"
    )
    parser.add_argument("--html", metavar="FILE", help="with --inspect: write them as a page instead")
    parser.add_argument("--plan", action="store_true", help="predict the run's time and memory, and exit")
    known = f"with --plan or --dry-run: plan for these devices instead of this machine's; known: {', '.join(KNOWN)}"
    parser.add_argument("--devices", metavar="8xA100-40G", help=known)
    links = "with --plan: the link inside a host and the link between hosts"
    parser.add_argument("--links", metavar="nvlink4,ib400", help=links)
    parser.add_argument("--per-host", type=int, metavar="N", help="with --links: GPUs of a host; 8 otherwise")
    parser.add_argument("--search", action="store_true", help=staged("with --plan: propose dims, micro-batch, ..."))
    parser.add_argument("--calibrate", action="store_true", help="with --plan: measure the layers here first")
    parser.add_argument("--prove", action="store_true", help=staged("compare a small run with one process, and exit"))
    parser.add_argument("--record", metavar="FOLDER", help=argparse.SUPPRESS)  # where ranks of a proof record steps
    for option in options_of(kind):
        option.add_flags(parser)
    # DeepSpeed's launcher passes the first spelling, torch.distributed.launch the second.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override keys of the config")
    return parser


def parse_arguments(kind: type[TrainConfig], description: str, in_stages: bool = True) -> argparse.Namespace:
    """Parse the command line and check that its options go together.

    Args:
        kind: of the config; overrides name its keys.
    """
    parser = make_parser(kind, description, in_stages)
    is_override = partial(_is_override, kind)
    arguments = parser.parse_intermixed_args()
    if arguments.data:  # has swallowed the overrides behind it
        arguments.overrides += filter(is_override, arguments.data)
        arguments.data = [word for word in arguments.data if not is_override(word)]

    names = list(ACTIONS)
    for option in options_of(kind):
        names += option.on_ranks
    *first, last = [f"--{name.replace('_', '-')}" for name in names]
    actions = f"{', '.join(first)} and {last}"
    acts = sum(bool(getattr(arguments, name)) for name in names)

    if acts > 1:
        parser.error(f"{actions}: expected one of them")
    if {bool(arguments.model), bool(arguments.data), bool(arguments.save)} != {arguments.auto}:
        parser.error("--auto, --model, --data and --save: expected all of them, or --config")
    if arguments.auto and acts:
        parser.error(f"{actions} need --config")
    if arguments.devices and not (arguments.plan or arguments.dry_run):
        parser.error("--devices needs --plan or --dry-run")
    for flag, needed in NEEDED.items():
        if getattr(arguments, flag) and not getattr(arguments, needed):
            parser.error(f"--{flag.replace('_', '-')} needs --{needed}")
    return arguments


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {word}")
    return int(word)


def _is_override(kind: type[TrainConfig], word: str) -> bool:
    """Return whether the word is `key.sub=value` of an existing key."""
    key, equals, _ = word.partition("=")
    return bool(equals) and key.split(".")[0] in (*kind.model_fields, *ALIASES)


def run_entry_point(
    arguments: argparse.Namespace,
    load: Callable[[ProcessInfo | None], TrainConfig],
    run: Callable[[TrainConfig, ProcessInfo, RankMonitor], bool],
    plan: Callable[[TrainConfig, argparse.Namespace], None],
    prove: Callable[[TrainConfig], None] | None = None,
    auto: Callable[[argparse.Namespace, Hosts | None], Path] | None = None,
) -> None:
    """Do what the arguments ask for: inspect, plan, prove, choose a config, launch, or run one rank.

    Args:
        arguments: see `parse_arguments`.
        load: returns the checked config.
        run: does one rank's whole job; returns whether to start over.
        plan: does `--plan`.
        prove: does `--prove`, if the entry point has it.
        auto: returns the config file of `--auto`, chosen now or at an earlier start.
    """

    def with_override(word: str) -> TrainConfig:
        arguments.overrides.append(word)
        try:
            return load(None)
        finally:
            arguments.overrides.pop()

    process = ProcessInfo.from_environment()
    if process is not None:
        processes.end_with_launcher(process)
    with exit_with_one_line(process.rank if process else None):
        hosts = _check_arguments(arguments, process)
        if arguments.auto:
            _configure(arguments, auto, process, hosts)
        config = load(ProcessInfo(0, sum(map(len, hosts.values())), 0, 1) if hosts else process)
        keep_tracebacks_in(config.save_path)
        if arguments.prove and prove is None:
            raise ConfigError("--prove: proves pipelines; expected train_ds.py")
        if arguments.prove and process is not None:
            raise ConfigError("--prove: starts processes of its own, on this machine; expected python train_ds.py")
        if process is None and not hosts and not (arguments.plan and shape_of(config.model_path)):
            alone = arguments.plan or arguments.prove or arguments.inspect or config.from_scratch
            find_model(config.model_path, weights=not alone)
        if any(option.act(config, arguments) for option in options_of(config)):
            return
        if arguments.plan:
            if process is None or process.rank == 0:
                plan(config, arguments)
        elif arguments.prove and prove:
            name_accelerator()
            prove(config)
        elif arguments.inspect:
            name_accelerator()
            inspect(config, arguments.inspect, arguments.html)
        elif hosts:
            launch(config, hosts, with_override)
        else:
            run_or_launch(config, process, run)


def _check_arguments(arguments: argparse.Namespace, process: ProcessInfo | None) -> Hosts | None:
    """Check the device names and read the hostfile, if any."""
    if arguments.inspect or arguments.plan or arguments.prove or arguments.auto:
        early_signals.give_back()  # there is nothing to save
    if arguments.devices:
        parse_devices(arguments.devices)
    if not arguments.hostfile or RUN in os.environ:
        return None
    _refuse_launcher("--hostfile", process)
    return read_hostfile(arguments.hostfile, arguments.include, arguments.exclude)


def _configure(
    arguments: argparse.Namespace,
    auto: Callable[[argparse.Namespace, Hosts | None], Path] | None,
    process: ProcessInfo | None,
    hosts: Hosts | None,
) -> None:
    """Choose a config for `--auto`, then continue as if `--config` had named its file."""
    if auto is None:
        raise ConfigError("--auto: configures pipelines; expected train_ds.py")
    _refuse_launcher("--auto", process)
    keep_tracebacks_in(arguments.save)
    arguments.config = str(auto(arguments, hosts))
    sys.argv[1:] = ["--config", arguments.config, *arguments.overrides]  # the run's processes get these too
    if arguments.dry_run:
        names = ("hostfile", "include", "exclude")
        where = [f"--{name}={value}" for name in names if (value := getattr(arguments, name))]
        words = ["python", *sys.argv, *where]
        print(f"dry run: nothing is trained; {shlex.join(words)} trains")
        sys.exit()


def _refuse_launcher(option: str, process: ProcessInfo | None) -> None:
    if process is not None:
        raise ConfigError(f"{option}: starts the processes itself; expected python {Path(sys.argv[0]).name}")


def inspect(config: TrainConfig, count: int, html: str | None = None) -> None:
    """Print samples as they are trained on, the first ones and one of each type of record, or write them as a page."""
    from common.log import Log
    from data.inspection import summary
    from data.inspection.inspect import choose_samples, show_samples, write_page
    from models.api import read_spec
    from training.data_setup import RecordReader
    from training.language_model import language_model_of

    console = Log()
    folder = find_model(config.model_path, weights=False)
    read_spec(folder)  # an unsupported model is reported before a missing tokenizer
    reader = RecordReader(config, folder, console)
    if config.windows_key:
        dataset = language_model_of(config).first_window(config, reader)
    else:
        dataset = reader.read("data", config.data_path)
    console.print(summary.table(dataset), highlight=False)
    warnings = [f"warning: {each}" for each in summary.warnings(dataset, config.max_seq_len)]
    console.print("\n".join([*summary.facts(dataset, config.max_seq_len), *warnings]), highlight=False)
    numbers = choose_samples(dataset, count)
    samples = [dataset.samples[number] for number in numbers]
    if html:
        write_page(samples, reader.tokenizer, html, title=f"Samples of {Path(config.save_path).name}")
        console.print(f"{len(samples)} samples in {html}")
    else:
        show_samples(samples, reader.tokenizer, console, list(map(dataset.origin, numbers)))

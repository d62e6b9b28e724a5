"""The command line of train_ds.py and train_ds_zero.py.

torch takes seconds to import, so it is imported after the config is checked: config errors are reported immediately.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common import early_signals
from common.command_line import Parser
from common.terminal import typed_name
from models.checkpoint.hub import find_model
from training.config.foreign_names import FOREIGN
from training.config.keys import ALIASES, TrainConfig
from training.distributed import joining
from training.distributed.processes import ProcessInfo
from training.distributed.script import run_or_launch
from training.errors import ConfigError, exit_with_one_line, keep_tracebacks_in
from training.launch.start import name_accelerator
from training.option import CommandLine, EntryPoint, find_action, options_of

if TYPE_CHECKING:
    from training.distributed.rank_monitor import RankMonitor

NEEDS = {"html": ("inspect",)}  # of the core's flags those without effect unless another one is given


def make_parser(kind: type[TrainConfig], description: str = "", in_stages: bool = True) -> Parser:
    """Make the parser, with the flags of the options of `kind`; without a pipeline, hide those that need one."""
    parser = Parser(prog=typed_name(), description=description)
    parser.set_defaults(processes=None)  # see `Flags.prepare`
    keys = {name: key for name, (key, *_) in FOREIGN.items() if key} | {key: key for key in kind.model_fields}
    parser.meant = {f"--{name}": f"{key}=VALUE" for name, key in keys.items()}
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", help="YAML file of the run")
    for option in options_of(kind):  # first, as the usage shows a group only where its flags follow each other
        option.flags.add(CommandLine(parser, source, in_stages))
    parser.add_argument(
        "--inspect", type=_count, metavar="N", help="print N samples and one of each other type, and exit"
    )
    parser.add_argument("--html", metavar="FILE", help="with --inspect: write them as a page instead")
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
    arguments = parser.parse_intermixed_args()
    for option in options_of(kind):
        option.flags.check(parser, arguments, partial(_is_override, kind))

    names, needs = ["inspect"], dict[str, Sequence[str]](NEEDS)
    for option in options_of(kind):
        names += [*option.flags.acts, *option.flags.on_ranks]
        needs |= option.flags.needs
    *first, last = map(_spelled, names)
    actions = f"{', '.join(first)} and {last}" if first else last
    acts = sum(bool(getattr(arguments, name)) for name in names)

    if acts > 1:
        parser.error(f"{actions}: expected one of them")
    if acts and not arguments.config:
        parser.error(f"{actions} need --config")
    for flag, needed in needs.items():
        if getattr(arguments, flag) and not any(getattr(arguments, name) for name in needed):
            parser.error(f"{_spelled(flag)} needs {' or '.join(map(_spelled, needed))}")
    return arguments


def _spelled(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {word}")
    return int(word)


def _is_override(kind: type[TrainConfig], word: str) -> bool:
    """Return whether the word is `key.sub=value` of an existing key."""
    key, equals, _ = word.partition("=")
    return bool(equals) and key.split(".")[0] in (*kind.model_fields, *ALIASES)


def run_entry_point(
    kind: type[TrainConfig],
    arguments: argparse.Namespace,
    load: Callable[[ProcessInfo | None], TrainConfig],
    run: Callable[[TrainConfig, ProcessInfo, RankMonitor], bool],
    in_stages: bool = True,
) -> None:
    """Do what the arguments ask for: act in place of training, inspect, launch, or run one rank.

    Args:
        arguments: see `parse_arguments`.
        load: returns the checked config.
        run: does one rank's whole job; returns whether to start over.
    """

    def with_override(word: str) -> TrainConfig:
        arguments.overrides.append(word)
        try:
            return load(None)
        finally:
            arguments.overrides.pop()

    process = ProcessInfo.from_environment()
    if process is not None:
        joining.end_with_launcher(process)
    with exit_with_one_line(process.rank if process else None):
        act = find_action(options_of(kind), arguments)
        if act or arguments.inspect or not arguments.config:
            early_signals.give_back()  # there is nothing to save
        found = (option.flags.find_hosts(arguments, process) for option in options_of(kind))
        hosts = next(filter(None, found), None)
        entry = EntryPoint(kind, in_stages, process, hosts)
        for option in options_of(kind):
            option.flags.prepare(arguments, entry)

        config = load(ProcessInfo(0, sum(map(len, hosts.devices.values())), 0, 1) if hosts else process)
        keep_tracebacks_in(config.save_path)
        # A missing model is reported before what takes seconds to import.
        if act.reads_model(config) if act else process is None and not hosts:
            find_model(config.model_path, weights=not (act or arguments.inspect or config.from_scratch))
        if act or arguments.inspect:
            name_accelerator()
        if act:
            act.do(config, arguments, entry)
        elif arguments.inspect:
            inspect(config, arguments.inspect, arguments.html)
        elif hosts:
            hosts.launch(config, with_override)
        else:
            run_or_launch(config, process, run)


def refuse_launcher(option: str, process: ProcessInfo | None) -> None:
    """Refuse an option that starts processes in one of a launcher.

    Raises:
        ConfigError: there is such a process.
    """
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
    name = Path(config.save_path).name
    if html:
        write_page(samples, reader.tokenizer, html, title=f"Samples of {name}")
        console.print(f"{len(samples)} samples in {html}")
    else:
        show_samples(samples, reader.tokenizer, console, list(map(dataset.origin, numbers)))

    if any(sample.get("images") for sample in samples):
        from data.inspection.sheet import draw_sheet

        sheet = Path(html).with_suffix(".png") if html else Path(f"{name}-samples.png")
        console.print(f"images: those of {draw_sheet(samples, reader.tokenizer, sheet)} samples, in {sheet}")

"""Run `pipetune COMMAND ...`: the entry points under one name.

A command of a script runs it with the rest of the command line as it stands: `pipetune train --config F` is
`python train_ds.py --config F`, which starts its own launcher, on several machines with --hostfile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import pipetune
from common.command_line import Parser
from common.terminal import TYPED, typed_name
from pipetune import FOLDER, INSTALLED, _package

ROOT = FOLDER if INSTALLED else FOLDER.parent  # of the scripts and configs
TEMPLATES = ("ds_config_pp.yml", "ds_config_zero.yml")
SHELLS = ("bash", "zsh", "tcsh")


class Command(NamedTuple):
    """A command that a script runs, with words before the rest of the command line, or a function here."""

    purpose: str
    script: str = ""
    words: tuple[str, ...] = ()
    run: Callable[[], None] | None = None


def main() -> None:
    name, rest = next(iter(sys.argv[1:]), "--help"), sys.argv[2:]
    if name == "--version":
        print(f"pipetune {pipetune.__version__}")
    elif name in ("--help", "-h"):
        print(usage())
    elif name in COMMANDS:
        command = COMMANDS[name]
        os.environ[TYPED] = f"pipetune {name}"
        sys.argv = [sys.argv[0], *rest]
        if command.run:
            command.run()
        else:
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, str(ROOT / command.script), *command.words, *rest])
    else:
        near = get_close_matches(name, COMMANDS, 1)
        expected = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        print(f"error: {name}: no such command; {expected}", file=sys.stderr)
        sys.exit(2)


def report() -> None:
    from options.reports.report import main as draw_report

    draw_report()


def init_parser() -> Parser:
    parser = Parser(prog=typed_name(), description="Write a config to start from.")
    parser.add_argument("file", type=Path, nargs="?", default=Path("pipetune.yml"), help="default pipetune.yml")
    parser.add_argument("--zero", action="store_true", help="one for train-zero, without a pipeline")
    parser.add_argument("--from", dest="origin", type=Path, metavar="FILE", help="translate another tool's config")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="with --from: devices to train on")
    return parser


def init() -> None:
    """Write the template of a config, with every key that most runs set."""
    parser = init_parser()
    arguments = parser.parse_args()
    if arguments.gpus and not arguments.origin:
        parser.error("--gpus needs --from")
    if arguments.origin:
        from options.other_tools.command import write_or_exit

        write_or_exit(arguments.origin, arguments.file, arguments.gpus)
        return
    template = ROOT / "configs" / TEMPLATES[arguments.zero]
    text = template.read_text(encoding="utf-8").replace("$schema=", f"$schema={template.parent}/", 1)
    text = text.replace("python train_ds.py --config", "pipetune train --config")
    text = text.replace(f"configs/{template.name}", str(arguments.file))
    try:
        with arguments.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        parser.error(f"{arguments.file}: {error.strerror}; expected the name of a new file")
    print(f"{arguments.file}: set model_path, data_path and save_path, then: pipetune plan --config {arguments.file}")


def completion_parser() -> Parser:
    parser = Parser(prog=typed_name(), description="Print the completion of a shell.")
    parser.add_argument("shell", choices=SHELLS, help='such as: eval "$(pipetune completion bash)"')
    return parser


def completion() -> None:
    """Print a script that lets a shell complete commands and options."""
    import shtab

    print(shtab.complete(whole_parser(), completion_parser().parse_args().shell))


def whole_parser() -> Parser:
    """Gather the options of all commands; files are completed where an option names one."""
    import shtab

    from options import RunConfig
    from options.demo.command_line import make_parser as demo_parser
    from options.reports.report import make_parser as report_parser
    from training.command_line import make_parser as train_parser

    parsers = {"convert": _package("convert_model").make_parser(), "demo": demo_parser(), "report": report_parser()}
    parsers |= {"init": init_parser(), "completion": completion_parser()}
    whole = Parser(prog="pipetune")
    commands = whole.add_subparsers()
    for name, command in COMMANDS.items():
        parent = parsers.get(name) or train_parser(RunConfig, in_stages=name != "train-zero")
        parser = commands.add_parser(name, parents=[parent], add_help=False, help=command.purpose)
        for action in parser._actions:
            if action.dest in ("config", "file") or action.metavar in ("DIR", "FILE"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return whole


COMMANDS = {
    "train": Command("fine-tune a model in a pipeline", "train_ds.py"),
    "train-zero": Command("the same with ZeRO, without a pipeline", "train_ds_zero.py"),
    "auto": Command("choose a config for a model and its data, and train", "train_ds.py", ("--auto",)),
    "plan": Command("predict a run's memory, time and stages", "train_ds.py", ("--plan",)),
    "inspect": Command("print the first samples as they are trained", "train_ds.py", ("--inspect", "3")),
    "prove": Command("compare a small run with one process", "train_ds.py", ("--prove",)),
    "check": Command("compare the hosts and measure their links", "train_ds.py", ("--check",)),
    "convert": Command("move weights between layouts, check or download a model", "convert_model.py"),
    "demo": Command("talk to a model", "demo.py"),
    "report": Command("draw a run's loss, speed and memory", run=report),
    "init": Command("write a config to start from", run=init),
    "completion": Command("print what lets a shell complete all this", run=completion),
}


def usage() -> str:
    """List the commands; each has a --help of its own."""
    lines = [f"  {name:<11} {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: pipetune COMMAND ...   (pipetune COMMAND --help tells more)", "", *lines])


if __name__ == "__main__":
    main()

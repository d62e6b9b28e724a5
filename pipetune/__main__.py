"""Run `pipetune COMMAND ...`: the entry points under one name.

A command of a script runs it with the rest of the command line as it stands: `pipetune train --config F` is
`python train_ds.py --config F`, which starts its own launcher, on several machines with --hostfile.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import pipetune
from common.terminal import TYPED
from pipetune import FOLDER, INSTALLED, _package

TEMPLATES = ("ds_config_pp.yml", "ds_config_zero.yml")
SHELLS = ("bash", "zsh", "tcsh")


class Command(NamedTuple):
    """A script, the words before the rest of the command line, and the purpose."""

    script: str
    words: tuple[str, ...]
    purpose: str


COMMANDS = {
    "train": Command("train_ds.py", (), "fine-tune a model in a pipeline"),
    "train-zero": Command("train_ds_zero.py", (), "the same with ZeRO, without a pipeline"),
    "auto": Command("train_ds.py", ("--auto",), "choose a config for a model and its data, and train"),
    "plan": Command("train_ds.py", ("--plan",), "predict a run's memory, time and stages"),
    "inspect": Command("train_ds.py", ("--inspect", "3"), "print the first samples as they are trained"),
    "prove": Command("train_ds.py", ("--prove",), "compare a small run with one process"),
    "check": Command("train_ds.py", ("--check",), "compare the hosts and measure their links"),
    "convert": Command("convert_model.py", (), "move weights between layouts, check or download a model"),
    "demo": Command("demo.py", (), "talk to a model"),
}


def main() -> None:
    command, rest = next(iter(sys.argv[1:]), "--help"), sys.argv[2:]
    if command in COMMANDS:
        run_script(command, rest)
    elif command in OWN:
        os.environ[TYPED] = f"pipetune {command}"
        sys.argv = [sys.argv[0], *rest]
        OWN[command][0]()
    elif command == "--version":
        print(f"pipetune {pipetune.__version__}")
    elif command in ("--help", "-h"):
        print(usage())
    else:
        near = get_close_matches(command, [*COMMANDS, *OWN], 1)
        expected = f"did you mean {near[0]}?" if near else f"expected one of {', '.join((*COMMANDS, *OWN))}"
        print(f"error: {command}: no such command; {expected}", file=sys.stderr)
        sys.exit(2)


def run_script(command: str, rest: list[str]) -> None:
    """Become the command's script, whose usage line then names the command."""
    script, words, _ = COMMANDS[command]
    path = (FOLDER if INSTALLED else FOLDER.parent) / script
    sys.stdout.flush()
    environment = os.environ | {TYPED: f"pipetune {command}"}
    os.execve(sys.executable, [sys.executable, str(path), *words, *rest], environment)


def report() -> None:
    from training.report import main as draw_report

    draw_report()


def init_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pipetune init", description="Write a config to start from.")
    parser.add_argument("file", type=Path, nargs="?", default=Path("pipetune.yml"), help="default pipetune.yml")
    parser.add_argument("--zero", action="store_true", help="one for train-zero, without a pipeline")
    return parser


def init() -> None:
    """Write the template of a config, with every key that most runs set."""
    parser = init_parser()
    arguments = parser.parse_args()
    template = (FOLDER if INSTALLED else FOLDER.parent) / "configs" / TEMPLATES[arguments.zero]
    try:
        with arguments.file.open("x", encoding="utf-8") as file:
            file.write(template.read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(f"{arguments.file}: {error.strerror}; expected the name of a new file")
    print(f"{arguments.file}: set model_path, data_path and save_path, then: pipetune plan --config {arguments.file}")


def completion_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pipetune completion", description="Print the completion of a shell.")
    parser.add_argument("shell", choices=SHELLS, help='such as: eval "$(pipetune completion bash)"')
    return parser


def completion() -> None:
    """Print a script that lets a shell complete commands and options."""
    import shtab

    print(shtab.complete(whole_parser(), completion_parser().parse_args().shell))


def whole_parser() -> argparse.ArgumentParser:
    """Gather the options of all commands; files are completed where an option names one."""
    import shtab

    from training.command_line import make_parser as train_parser
    from training.demo.command_line import make_parser as demo_parser
    from training.report import make_parser as report_parser

    parsers = {"convert": _package("convert_model").make_parser(), "demo": demo_parser(), "report": report_parser()}
    parsers |= {"init": init_parser(), "completion": completion_parser()}
    whole = argparse.ArgumentParser(prog="pipetune")
    commands = whole.add_subparsers()
    for name in (*COMMANDS, *OWN):
        parent = parsers.get(name) or train_parser(in_stages=name != "train-zero")
        purpose = COMMANDS[name].purpose if name in COMMANDS else OWN[name][1]
        command = commands.add_parser(name, parents=[parent], add_help=False, help=purpose)
        for action in command._actions:
            if action.dest in ("config", "file") or action.metavar in ("DIR", "FILE"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return whole


# What runs here, without a script of its own.
OWN: dict[str, tuple[Callable[[], None], str]] = {
    "report": (report, "draw a run's loss, speed and memory"),
    "init": (init, "write a config to start from"),
    "completion": (completion, "print what lets a shell complete all this"),
}


def usage() -> str:
    """List the commands; each has a --help of its own."""
    purposes = {name: command.purpose for name, command in COMMANDS.items()}
    purposes |= {name: purpose for name, (_, purpose) in OWN.items()}
    lines = [f"  {name:<11} {purpose}" for name, purpose in purposes.items()]
    return "\n".join(["usage: pipetune COMMAND ...   (pipetune COMMAND --help tells more)", "", *lines])


if __name__ == "__main__":
    main()

"""`pipetune COMMAND ...`: the entry points under one name.

Each command runs the script of that name with the rest of the command line as it stands: `pipetune train --config F` is
`python train_ds.py --config F`, which starts its own launcher, on several machines with --hostfile.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import pipetune
from pipetune import FOLDER, INSTALLED


class Command(NamedTuple):
    """A script, the words before the rest of the command line, and the purpose."""

    script: str
    words: tuple[str, ...]
    purpose: str


COMMANDS = {
    "train": Command("train_ds.py", (), "fine-tune a model in a pipeline"),
    "train-zero": Command("train_ds_zero.py", (), "the same with ZeRO, without a pipeline"),
    "convert": Command("convert_model.py", (), "move weights between layouts, check, download"),
    "demo": Command("demo.py", (), "talk to a model"),
    "plan": Command("train_ds.py", ("--plan",), "what a run will take: memory, time, stages"),
    "inspect": Command("train_ds.py", ("--inspect", "3"), "the first samples as they would be trained"),
}


def main() -> None:
    command, rest = next(iter(sys.argv[1:]), "--help"), sys.argv[2:]
    if command == "--version":
        print(f"pipetune {pipetune.__version__}")
    elif command in ("--help", "-h"):
        print(usage())
    elif command not in COMMANDS:
        sys.exit(f"error: {command}: no such command; expected one of {', '.join(COMMANDS)}")
    else:
        script, words, _ = COMMANDS[command]
        path = (FOLDER if INSTALLED else FOLDER.parent) / script
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, str(path), *words, *rest])


def usage() -> str:
    """List the commands; each has a --help of its own."""
    lines = [f"  {name:<11} {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: pipetune COMMAND ...   (pipetune COMMAND --help tells more)", "", *lines])


if __name__ == "__main__":
    main()

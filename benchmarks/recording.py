r"""Record what a command prints as a picture of a terminal, such as the README's.

    python -m benchmarks.recording docs/pictures/run.svg \
        train_ds.py --config configs/quickstart.yml save_path=runs/recording max_steps=6

The command is a script of this repository with its arguments. The picture is one file: it loads no font from elsewhere.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 112
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Record what a command prints as an SVG picture.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script and its arguments")
    arguments = parser.parse_args()
    words = [sys.executable, *arguments.command]
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}  # so that both streams keep their order
    done = subprocess.run(
        words, env=unbuffered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    printed = done.stdout.rstrip().replace(str(Path.home()), "~")
    if done.returncode or str(Path.cwd()) in printed:
        print(f"{printed}\nerror: expected a command that succeeds and prints no path of this machine", file=sys.stderr)
        return 1
    draw(f"python {' '.join(arguments.command)}", printed, arguments.picture)
    return 0


def draw(command: str, printed: str, picture: Path) -> None:
    """Draw a terminal with a command and what it printed, colours included."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text(f"$ {command}", style="bold green"))
    console.print(Text.from_ansi(printed))
    console.save_svg(str(picture), title="pipetune", code_format=FORMAT, unique_id="run")


if __name__ == "__main__":
    sys.exit(main())

"""Record what a command prints as a picture of a terminal, such as the README's.

    python -m benchmarks.recording PICTURE.svg SCRIPT [ARGUMENT ...]

The README's are docs/pictures/run.svg and train_ds.py --config configs/quickstart.yml save_path=runs/recording
max_steps=6. The picture loads no font from elsewhere.
"""

from __future__ import annotations

import io
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
    picture, *command = sys.argv[1:]
    unbuffered = [sys.executable, "-u", *command]  # so that both streams keep their order
    done = subprocess.run(unbuffered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    printed = done.stdout.rstrip().replace(str(Path.home()), "~")
    if done.returncode or str(Path.cwd()) in printed:
        print(f"{printed}\nerror: expected a command that succeeds and prints no path of this machine", file=sys.stderr)
        return 1
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text(f"$ python {' '.join(command)}", style="bold green"))
    console.print(Text.from_ansi(printed))
    console.save_svg(picture, title="pipetune", code_format=FORMAT, unique_id="run")
    return 0


if __name__ == "__main__":
    sys.exit(main())

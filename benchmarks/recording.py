"""Record what a command prints as a picture of a terminal, such as the README's.

    python -m benchmarks.recording PICTURE.svg SCRIPT [ARGUMENT ...]

The command has a terminal of its own, so that it draws and redraws as it does for a user; the picture shows what is
left there at its end. `make pictures` has the README's command. The picture loads no font from elsewhere.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 112, 60  # characters
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
COLOUR, MOVE = r"\x1b\[[\d;]*m", r"\x1b\[[\d;?]*[A-Za-ln-z]"
PIECES = re.compile(rf"\r|\n|{MOVE}|(?:{COLOUR}|[^\r\n\x1b])+")


def main() -> int:
    picture, *command = sys.argv[1:]
    code, printed = run_in_terminal([sys.executable, *command])
    left = "\n".join(screen(printed)).rstrip().replace(str(Path.home()), "~")
    if code or str(Path.cwd()) in left:
        print(f"{left}\nerror: expected a command that succeeds and prints no path of this machine", file=sys.stderr)
        return 1
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text(f"$ python {' '.join(command)}", style="bold green"))
    console.print(Text.from_ansi(left))
    console.print()  # or the last line would touch the frame
    console.save_svg(picture, title="pipetune", code_format=FORMAT, unique_id="run")
    return 0


def run_in_terminal(command: list[str]) -> tuple[int, str]:
    """Run a command in a terminal of `WIDTH` columns; return its exit code and all that it wrote."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=there, stderr=there, env=environment)
    os.close(there)
    written = b""
    try:
        while part := os.read(here, 65536):
            written += part
    except OSError:  # as Linux says that nobody has the other end any more
        pass
    os.close(here)
    return process.wait(), written.decode("utf-8", "replace")


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows at the end, with their colours.

    Of what moves the cursor it knows what rich and tqdm write: back to the line's begin, up, and erasing a line.
    """
    lines, row, begins = [""], 0, True  # `begins`: the cursor is in the first column, so what comes replaces the line
    for piece in PIECES.findall(written):
        if piece == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif piece == "\r":
            begins = True
        elif not re.fullmatch(MOVE, piece):
            lines[row] = piece if begins else lines[row] + piece
            begins = False
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece.endswith("A"):
            row = max(0, row - int(piece[2:-1] or 1))
    return lines


if __name__ == "__main__":
    sys.exit(main())

"""convert_model.py as from the command line, but inside the process of the tests: a start costs four seconds."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

import convert_model

BAR = re.compile(r"(hg_to_pp|pp_to_hg|hg_to_onnx|verify): ")  # how a progress bar begins


def convert(command: str, source: Path, target: Path, *options: str) -> tuple[int, list[str]]:
    """Run a conversion; gives the exit code and the lines on stderr, progress bars aside."""
    words = ["convert_model.py", command, "--input-path", str(source), "--save-path", str(target), *options]
    code, told = 0, io.StringIO()
    with mock.patch.object(sys, "argv", words), redirect_stderr(told):
        try:
            convert_model.main()
        except SystemExit as left:
            assert isinstance(left.code, int)
            code = left.code
    return code, [line for line in told.getvalue().splitlines() if line.strip() and not BAR.match(line)]


def refusal(command: str, source: Path, target: Path, *options: str) -> str:
    """The one line of a conversion that has to be refused, which leaves with 2 and no target."""
    existed = target.exists()
    code, lines = convert(command, source, target, *options)
    assert code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert target.exists() == existed
    return lines[0]

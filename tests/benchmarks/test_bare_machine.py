"""The GPU benchmarks on a machine that has nothing of ours: Python 3.12, torch 2.11, transformers 5.17 and wheels.

PIPETUNE_BARE_PYTHON names the python of an environment that is made already; else one is made, of 5 GB.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.wheels import MACHINE
from tests.launching import run

NEEDS_CUDA = {"packed-varlen", "trainer-liger", "fp8"}
LIMIT = 60e6  # bytes of repository and wheels together


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if made := os.environ.get("PIPETUNE_BARE_PYTHON"):
        return made
    found = shutil.which("python3.12")
    if not found or run(found, "-c", "import venv, ensurepip").returncode:
        pytest.skip("no Python 3.12 with venv on the path")
    folder = tmp_path_factory.mktemp("bare")
    run(found, "-m", "venv", folder)
    python = str(folder / "bin" / "python")
    lines = (line.partition("#")[0].strip() for line in MACHINE.read_text(encoding="utf-8").splitlines())
    installed = run(python, "-m", "pip", "install", "--quiet", *filter(None, lines))
    if installed.returncode:
        pytest.skip(f"its packages cannot be installed: {installed.stderr.splitlines()[-1]}")
    return python


@pytest.mark.longest
@pytest.mark.launched
def test_every_line_is_green_that_needs_no_gpu(bare_python: str, tmp_path: Path) -> None:
    collected = run(sys.executable, "-m", "benchmarks.wheels", tmp_path / "wheels")
    assert collected.returncode == 0, collected.stderr
    tracked = run("git", "ls-files", "-z").stdout.split("\0")
    carried = [Path(name) for name in tracked if name] + list((tmp_path / "wheels").iterdir())
    assert sum(path.stat().st_size for path in carried if path.is_file()) < LIMIT
    names = ("kernels", "attention", "parity", "race", "resume", "stages", "profile", "trainer", "zero", *NEEDS_CUDA)
    found = run(
        *(bare_python, "-m", "benchmarks.gpu", "--device", "cpu", "--minutes", "60"),
        *("--wheels", str(tmp_path / "wheels"), "--out", str(tmp_path / "out"), "--only", *names),
    )
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["way"]: row.get("left_out") for row in rows if "left_out" in row} == dict.fromkeys(
        NEEDS_CUDA, "needs CUDA"
    )
    assert not [row for row in rows if "reason" in row]

"""Virtual environments with packages, or releases of packages, that the project does not stand on."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest


def environment(folder: Path, *packages: str, without: Sequence[str] = ()) -> Path:
    """The Python of a new environment that has `packages`, and of everything else what the tests run with.

    The test is skipped where pip cannot get the packages; where PIPETUNE_TEST_ALL is set, as by `make test-all`, it
    fails, so that what passes there has run.

    Args:
        without: what comes along with them and does not work.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        give_up(f"pip cannot install {' '.join(packages)}: {installed.stderr.strip().splitlines()[-1]}")
    if without:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *without], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own packages, which go first
    return python


def give_up(why: str) -> NoReturn:
    """Skip the test; under `make test-all` it fails."""
    (pytest.fail if os.environ.get("PIPETUNE_TEST_ALL") else pytest.skip)(why)

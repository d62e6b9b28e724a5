"""Virtual environments with packages, or releases of packages, that the project does not stand on."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def environment(folder: Path, *packages: str) -> Path:
    """The Python of a new environment that has `packages`, and of everything else what the tests run with.

    The test is skipped where pip cannot get the packages.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"pip cannot install {' '.join(packages)}: {installed.stderr.strip().splitlines()[-1]}")
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own packages, which go first
    return python

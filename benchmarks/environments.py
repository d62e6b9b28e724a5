"""Make virtual environments with packages, or releases of packages, that the project does not stand on."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

# What trl needs that the project does not; with all of its own it would bring another torch.
TRL = ("--no-deps", "trl==1.16.0", "datasets", "multiprocess", "dill", "xxhash", "pandas", "python-dateutil")


class NotInstalledError(Exception):
    """pip cannot get a package."""


def make_environment(folder: Path, *packages: str, without: Sequence[str] = ()) -> Path:
    """Return the Python of a new environment that has `packages`, and of everything else what this process runs with.

    Args:
        without: what comes along with them and does not work.

    Raises:
        NotInstalledError: with pip's last line.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        why = installed.stderr.strip().splitlines()[-1]
        raise NotInstalledError(f"pip cannot install {' '.join(packages)}: {why}")
    if without:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *without], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own packages, which go first
    return python

"""What the quickstart takes, ten minutes on two cores: a part of `python -m benchmarks.memory`.

It is run whole, in a folder of its own, and watched as in `benchmarks.tokenizing`: twice a second the proportional set
sizes of all its processes are added up; a page that several of them share counts once.

- `quickstart_gb`: the largest such sum.
- `quickstart_minutes`: from its start to its end, without fetching the model.
- `quickstart_disk_gb`: of all that it leaves.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.parts import against_targets
from benchmarks.ranks import ROOT
from benchmarks.tokenizing import family, proportional_set_size
from quickstart.base_model import make_base

PAUSE = 0.5  # seconds between two looks
TARGETS = {"quickstart_gb": "at most 6", "quickstart_minutes": "", "quickstart_disk_gb": ""}


def measure(folder: Path) -> dict[str, Any]:
    """All figures; its own lines go to standard error."""
    make_base(folder / "base", folder / "download")
    begin, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "quickstart", "--save-path", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    while process.poll() is None:
        peak = max(peak, sum(map(proportional_set_size, family(process.pid))))
        time.sleep(PAUSE)
    if process.returncode:
        sys.exit("the quickstart failed")
    left = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "download" not in path.parts)
    seconds = time.monotonic() - begin
    return {"quickstart_gb": peak / 1e9, "quickstart_minutes": seconds / 60, "quickstart_disk_gb": left / 1e9}


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    return against_targets("the quickstart", figures, TARGETS)

"""Start a benchmark's workers and take their figures.

A worker is a function of the benchmark's own module (`benchmarks.parts`); it leaves its figures with `tell`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = "result.json"


class Workers:
    """A worker in N processes through the launcher or, without a number, in one process without ranks."""

    def __init__(self, processes: int | None, module: str, folder: Path, work: str, given: dict[str, Any]) -> None:
        words = ["--folder", str(folder), "--work", work, "--given", json.dumps(given)]
        self._command = [*command(processes, module), *words]
        self._printed = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment(), stdout=self._printed, stderr=subprocess.STDOUT
        )

    def check(self) -> None:
        """Exit with their output where one has failed."""
        if self._process.poll():
            self._printed.seek(0)
            sys.exit(f"{' '.join(self._command)} failed:\n{self._printed.read()}")

    def wait(self) -> None:
        """Wait until all have ended."""
        self._process.wait()
        self.check()


def command(processes: int | None, module: str, visible: str = "") -> list[str]:
    """Make the command that starts a module; see `Workers`.

    Args:
        visible: the GPUs to take the first of, as in CUDA_VISIBLE_DEVICES; where absent any.
    """
    if not processes:
        return [sys.executable, "-m", module]
    from training.distributed.processes import free_port  # what a bare machine may not have yet

    numbers = ",".join(visible.split(",")[:processes])
    where = ["--include", f"localhost:{numbers}"] if visible else ["--num_gpus", str(processes)]
    launcher = ["deepspeed.launcher.runner", *where, "--master_port", str(free_port())]
    return [sys.executable, "-m", *launcher, "--module", module]


def environment() -> dict[str, str]:
    """Copy the environment, with the root first in PYTHONPATH."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def run_ranks(processes: int | None, module: str, folder: Path, work: str, **given: Any) -> Any:
    """Run a worker to its end; return what rank 0 told."""
    Workers(processes, module, folder, work, given).wait()
    return json.loads((folder / RESULT).read_text(encoding="utf-8"))


def tell(folder: Path, found: Any) -> None:
    """Leave the figures, on rank 0 or without ranks."""
    if os.environ.get("RANK", "0") == "0":
        (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")

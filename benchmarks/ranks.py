"""Starting a benchmark's workers, through the real launcher or alone, and taking what they found.

A worker is the benchmark's own module, run as a command with `--folder`; it leaves its figures there with `tell`.
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
    """A module at work: in so many processes through the launcher, or, without a number, in one that knows no others.

    As a script it would have this folder first in its path, where `data` is another thing.
    """

    def __init__(self, processes: int | None, module: str, folder: Path, *words: str) -> None:
        self._command = [*command(processes, module), "--folder", str(folder), *words]
        self._printed = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment(), stdout=self._printed, stderr=subprocess.STDOUT
        )

    def check(self) -> None:
        """Leave with what they printed where one has failed."""
        if self._process.poll():
            self._printed.seek(0)
            sys.exit(f"{' '.join(self._command)} failed:\n{self._printed.read()}")

    def wait(self) -> None:
        """Until all have ended."""
        self._process.wait()
        self.check()


def command(processes: int | None, module: str, visible: str = "") -> list[str]:
    """What starts a module; see `Workers`.

    Args:
        visible: the numbers of the GPUs to take the first of, as in CUDA_VISIBLE_DEVICES; where absent any.
    """
    if not processes:
        return [sys.executable, "-m", module]
    from training.distributed.processes import free_port  # what a bare machine may not have yet

    numbers = ",".join(visible.split(",")[:processes])
    where = ["--include", f"localhost:{numbers}"] if visible else ["--num_gpus", str(processes)]
    launcher = ["deepspeed.launcher.runner", *where, "--master_port", str(free_port())]
    return [sys.executable, "-m", *launcher, "--module", module]


def environment() -> dict[str, str]:
    """This process's, with the project's root in front of whatever packages were carried along."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def run_ranks(processes: int | None, module: str, folder: Path, *words: str) -> Any:
    """Run a module to its end; what rank 0 told."""
    Workers(processes, module, folder, *words).wait()
    return json.loads((folder / RESULT).read_text(encoding="utf-8"))


def tell(folder: Path, found: Any) -> None:
    """Leave what was found, on rank 0 or without ranks."""
    if os.environ.get("RANK", "0") == "0":
        (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")

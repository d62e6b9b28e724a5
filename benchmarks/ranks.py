"""Starting a benchmark's workers, through the real launcher or alone, and taking what they found.

A worker is the benchmark's own module, run as a command with `--folder`; it leaves its figures there with `tell`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.distributed import free_port

ROOT = Path(__file__).parent.parent
RESULT = "result.json"


def run_ranks(processes: int, module: str, folder: Path, *words: str) -> Any:
    """Run a module in so many processes, and return what rank 0 told; leave with what they printed where one fails.

    As a script it would have this folder first in its path, where `data` is another thing.
    """
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(processes), "--master_port", str(free_port())]
    return _run([*launcher, "--module", module], folder, words)


def run_alone(module: str, folder: Path, *words: str) -> Any:
    """The same in one process without a launcher, which knows of no others."""
    return _run(["-m", module], folder, words)


def tell(folder: Path, found: Any) -> None:
    """Leave what was found, on rank 0 or without ranks."""
    if os.environ.get("RANK", "0") == "0":
        (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")


def _run(start: list[str], folder: Path, words: Sequence[str]) -> Any:
    command = [sys.executable, *start, "--folder", str(folder), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads((folder / RESULT).read_text(encoding="utf-8"))

"""Starting a benchmark's workers through the real launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from training.distributed import free_port

ROOT = Path(__file__).parent.parent


def run_ranks(processes: int, module: str, *words: str) -> None:
    """Run a module in so many processes; leave with what they printed where one of them fails.

    As a script it would have this folder first in its path, where `data` is another thing.
    """
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(processes)]
    command += ["--master_port", str(free_port()), "--module", module, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{module} {' '.join(words)} failed:\n{done.stdout}{done.stderr}")

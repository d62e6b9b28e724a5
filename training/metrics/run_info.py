"""Write run.json: what a run was made of, so that its numbers can be explained years later.

It has versions, the code's git revision, the resolved config, the topology and rank 0's machine; a resumed run keeps
what its earlier starts wrote, under `earlier`. It has no environment variables, as they hold keys and tokens. Cost:
some 10 ms, mostly git.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from common.version import VERSION
from common.whole_files import read_regular, replace_text
from training.config.keys import TrainConfig
from training.metrics.step_metrics import to_json

RUN_FILE = "run.json"
CONFIG_FILE = "config.yml"  # beside it: the config with every default filled in
CODE = Path(__file__).resolve().parents[2]
# What can change a run's numbers or speed.
PACKAGES = (
    "torch deepspeed transformers accelerate safetensors tokenizers sentencepiece lion-pytorch numpy flash-attn "
    "liger-kernel".split()
)


def write_run_info(folder: Path, config: TrainConfig, parts: Sequence[int], first_step: int = 1) -> None:
    """Write `folder`/run.json atomically; `parts` are the layers of each stage, `first_step` this start's first."""
    path, topo = folder / RUN_FILE, config.model_topo
    info = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "first_step": first_step,
        "versions": versions(),
        "git": git_state(CODE),
        "topology": {
            "processes": topo.processes,
            "stages": topo.stages,
            "replicas": topo.replicas,
            "axes": list(topo.process_topology.axes),
            "dims": topo.process_topology.dims,
            "parts": list(parts),
        },
        "machine": machine(),
        "config": config.dump(),
        "earlier": _earlier_starts(path) if first_step > 1 else [],
    }
    replace_text(path, to_json(info, indent=2).decode() + "\n")


def machine() -> dict[str, Any]:
    """Describe the machine of this process."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str]:
    """Return the versions of Pipetune, Python, CUDA and `PACKAGES`."""
    found = {"pipetune": VERSION, "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the revision of the repository `folder` and whether tracked files differ; None without a repository."""
    if not (folder / ".git").exists():  # a copy of the code, maybe inside another repository
        return None
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        status = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):  # git is not installed, or does not trust the folder
        return None
    revision = next(line.split()[2] for line in status if line.startswith("# branch.oid "))
    modified = any(not line.startswith("#") for line in status)
    return {"revision": revision, "modified": modified} if revision != "(initial)" else None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()  # ARM's kernel names no model


def _earlier_starts(path: Path) -> list[dict[str, Any]]:
    """Return the entries of earlier starts, oldest first; none if the file is missing or damaged."""
    try:
        last = json.loads(read_regular(path))
        return [*last.pop("earlier"), last]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return []

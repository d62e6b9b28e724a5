"""run.json: what a run was made of, so that its numbers can be told apart from another's years later.

Versions, the code's git revision, the resolved config, the topology and rank 0's machine. A run that goes on keeps what
its earlier starts wrote, under `earlier`. Nothing is taken from the environment's variables, where keys and tokens
live. Writing it takes some 20 ms, most of it git's.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from training.atomic_files import replace_text
from training.config.keys import TrainConfig
from training.metrics.reporter import to_json

RUN_FILE = "run.json"
CODE = Path(__file__).resolve().parents[2]
# What can change a run's numbers or speed.
PACKAGES = (
    "torch deepspeed transformers accelerate safetensors tokenizers sentencepiece lion-pytorch numpy flash-attn "
    "liger-kernel".split()
)


def write_run_info(folder: Path, config: TrainConfig, parts: Sequence[int], first_step: int = 1) -> None:
    """Write `folder`/run.json, atomically.

    Args:
        folder: the run's folder.
        config: the resolved config.
        parts: layers of each stage.
        first_step: the step that this start begins with; above 1 when the run goes on.
    """
    path = folder / RUN_FILE
    info = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "first_step": first_step,
        "versions": versions(),
        "git": git_state(CODE),
        "topology": topology(config, parts),
        "machine": machine(),
        "config": config.dump(),
        "earlier": _earlier_starts(path) if first_step > 1 else [],
    }
    replace_text(path, to_json(info, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Of Python, CUDA and the installed packages that matter."""
    found = {"python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """The revision checked out in `folder` and whether tracked files differ from it; None where it is no repository."""
    described = _git(folder, "rev-parse", "HEAD", "--show-toplevel")
    if described is None:
        return None
    revision, top = described.splitlines()
    if not Path(top).samefile(folder):  # a copy of the code inside of somebody's own repository
        return None
    return {"revision": revision, "modified": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def topology(config: TrainConfig, parts: Sequence[int]) -> dict[str, Any]:
    """The grid of processes, and the layers of each stage."""
    topo = config.model_topo
    return {
        "processes": topo.processes,
        "stages": topo.stages,
        "replicas": topo.replicas,
        "axes": list(topo.process_topology.axes),
        "dims": topo.process_topology.dims,
        "parts": list(parts),
    }


def machine() -> dict[str, Any]:
    """This machine: system, processor, memory, GPUs."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": gpus,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()  # ARM's kernel names no model


def _git(folder: Path, *words: str) -> str | None:
    """What git prints; None where it fails or is not installed."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


def _earlier_starts(path: Path) -> list[dict[str, Any]]:
    """What the starts before this one wrote, oldest first; nothing where the file is missing or damaged."""
    try:
        last = json.loads(path.read_text(encoding="utf-8"))
        return [*last.pop("earlier"), last]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []

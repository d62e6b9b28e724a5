"""Starting the real launchers from tests, and reading what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT
from training.distributed.processes import free_port

DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TIMEOUT = 180  # seconds; far above what a run takes, so that a hang fails instead of stopping the suite


def deepspeed(processes: int, *words: str | Path, timeout: int = TIMEOUT) -> subprocess.CompletedProcess[str]:
    """`deepspeed --num_gpus N ...`"""
    launcher = (*DEEPSPEED, "--num_gpus", str(processes), "--master_port", str(free_port()))
    return run(*launcher, *words, timeout=timeout)


def torchrun(processes: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node N ...`"""
    return run(*TORCHRUN, "--nproc_per_node", str(processes), "--master_port", str(free_port()), *words)


def run(*words: str | Path, timeout: int = TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run a command from the project's root and keep what it prints."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start(*words: str | Path) -> subprocess.Popen[str]:
    """Start a command like `run`, without waiting for it."""
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_config(path: Path, **keys: Any) -> Path:
    """A YAML file of a run: small defaults for tests, and what is given on top."""
    defaults: dict[str, Any] = {
        "save_path": str(path.with_suffix("")),
        "train_batch_size": 8,
        "max_seq_len": 256,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3, "eps": 1.0e-6}},
    }
    path.write_text(yaml.safe_dump(defaults | keys), encoding="utf-8")
    return path


def topology(dims: Sequence[int], parts: Sequence[int] | None = None) -> dict[str, Any]:
    """The `model_topo` section."""
    section: dict[str, Any] = {"process_topology": {"axes": ["pipe", "data"], "dims": list(dims)}}
    return section | ({"parts": list(parts)} if parts else {})


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def error_lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What a command printed as the user's mistake."""
    return [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("error: ")]

"""A run that its door started goes on by itself after a fault, to the same bits; other launchers cannot do that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.conversion.to_huggingface import pp_to_hg
from tests.conftest import FAQ
from tests.launching import deepspeed, error_lines, metrics, start, topology, write_config

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS = 40
DOOR = (sys.executable, "train_ds.py", "--config")


def test_a_killed_rank_changes_no_bit(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    straight, disturbed = (configured(tmp_path / name, make_checkpoint) for name in ("straight.yml", "disturbed.yml"))
    result = start(*DOOR, straight).end()
    assert result.returncode == 0 and "restart" not in result.stderr, result.stderr
    launch, run = start(*DOOR, disturbed), disturbed.with_suffix("")
    launch.until(lambda: (run / "latest").exists() and len(metrics(run)) > 5)
    _, _, _, rank = launch.family()[:4]  # behind the supervisor, its agent and another rank
    rank.kill()
    result = launch.end()
    assert result.returncode == 0, result.stderr
    assert "restart 1 of 2: this machine: a process was killed by SIGKILL; nothing of the run was left" in result.stderr
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    one, other = weights(straight), weights(disturbed)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    refused = deepspeed(2, "train_ds.py", "--config", disturbed)
    assert refused.returncode == 2
    (line,) = error_lines(refused)
    assert line.startswith("error: max_restarts: 2: a launcher such as deepspeed or torchrun ends with its run; ")
    assert "expected python train_ds.py" in line


def configured(path: Path, make_checkpoint: Callable[..., Path]) -> Path:
    return write_config(
        path,
        model_path=str(make_checkpoint("llama")),
        data_path=str(FAQ),
        model_topo=topology((2, 1)),
        max_steps=STEPS,
        save_interval=4,
        max_restarts=2,
    )


def weights(config: Path) -> dict[str, torch.Tensor]:
    """What a run has come to."""
    pp_to_hg(config.with_suffix(""), config.with_suffix(".hg"))
    return load_file(config.with_suffix(".hg") / "model.safetensors")

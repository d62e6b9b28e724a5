"""A run that its door started goes on by itself after a fault, to the same bits; other launchers cannot do that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from models.checkpoint.export import pp_to_hg
from tests.conftest import FAQ
from tests.launching import deepspeed, error_lines, metrics, start, topology, write_config

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS = 40


def test_a_killed_rank_changes_no_bit(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    weights = []
    for name in ("straight", "disturbed"):
        config = write_config(
            tmp_path / f"{name}.yml",
            model_path=str(make_checkpoint("llama")),
            data_path=str(FAQ),
            model_topo=topology((2, 1)),
            max_steps=STEPS,
            save_interval=4,
            max_restarts=2,
        )
        launch = start(sys.executable, "train_ds.py", "--config", config)
        run = config.with_suffix("")
        if name == "disturbed":
            launch.until(lambda: (run / "latest").exists() and len(metrics(run)) > 5)
            _, _, _, rank = launch.family()[:4]
            assert "-u" in psutil.Process(rank.pid).cmdline()
            rank.kill()
        result = launch.end()
        assert result.returncode == 0, result.stderr
        assert ("restart 1 of 2: this machine: a process was killed by SIGKILL" in result.stderr) == (
            name == "disturbed"
        )
        assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
        pp_to_hg(run, tmp_path / f"{name}.hg")
        weights.append(load_file(tmp_path / f"{name}.hg/model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    refused = deepspeed(2, "train_ds.py", "--config", config)
    assert refused.returncode == 2
    (line,) = error_lines(refused)
    assert line.startswith("error: max_restarts: 2: a launcher such as deepspeed or torchrun ends with its run; ")
    assert "expected python train_ds.py" in line

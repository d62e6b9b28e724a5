"""A run that `python train_ds.py` starts restarts after a fault, to the same bits; other launchers cannot do that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FAQ
from tests.launching import (
    deepspeed,
    error_lines,
    metrics,
    start,
    steps_done,
    topology,
    trained_weights,
    write_config,
)
from tests.models.helpers import assert_same_bits

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS = 40
TRAIN = (sys.executable, "train_ds.py", "--config")


@pytest.mark.longest
def test_a_killed_rank_changes_no_bit(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    straight, disturbed = (configured(tmp_path / name, make_checkpoint) for name in ("straight.yml", "disturbed.yml"))
    result = start(*TRAIN, straight).end()
    assert result.returncode == 0 and "restart" not in result.stderr, result.stderr
    launch, run = start(*TRAIN, disturbed), disturbed.with_suffix("")
    launch.until(lambda: (run / "latest").exists() and steps_done(disturbed) > 5)
    _, _, _, rank = launch.family()[:4]  # behind the supervisor, its agent and another rank
    rank.kill()
    result = launch.end()
    assert result.returncode == 0, result.stderr
    assert "restart 1 of 2: this machine: a process was killed by SIGKILL; nothing of the run was left" in result.stderr
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    assert_same_bits(trained_weights(disturbed), trained_weights(straight))

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

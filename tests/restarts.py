"""Runs that are killed and go on, beside runs that nobody killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.launching import metrics, start, trained_weights, write_config
from tests.models.helpers import assert_same_bits
from tests.ranks import Ranks


def check_a_kill_changes_no_bit(ranks: Ranks, folder: Path, fault: str, **keys: Any) -> Path:
    """Run a config straight and, by tests/workers/faulty.py, with one restart; return the straight one's file.

    Args:
        fault: a kind that kills, the rank, and the step of each start in which it happens.
    """
    straight = write_config(folder / "straight.yml", **keys)
    disturbed = write_config(folder / "disturbed.yml", max_restarts=1, **keys)
    assert ranks.train(2, straight)["error"] is None

    result = start(sys.executable, "tests/workers/faulty.py", "--config", disturbed, FAULT=fault).end()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "restart 1 of 1: this machine: a process was killed by SIGKILL" in result.stderr

    runs = [path.with_suffix("") for path in (disturbed, straight)]
    found, expected = ([(line["step"], line["loss"]) for line in metrics(run)] for run in runs)
    assert found == expected and len(found) == keys["max_steps"]
    assert_same_bits(trained_weights(disturbed), trained_weights(straight))
    return straight

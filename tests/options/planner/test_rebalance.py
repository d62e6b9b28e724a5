"""`rebalance: true` in real launches: one command changes its parts on the way, with the losses of a hand that did it.

A calibration that takes the head to be very slow makes `parts: auto` begin with a bad division, which the first steps
then show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.api import read_spec
from options import load_config
from options.planner.measurements import MEASURED_FILE, Calibration, Measured
from tests.conftest import FAQ
from tests.launching import deepspeed, metrics, topology, torchrun, write_config
from tests.training.metrics.test_tracking import curves

pytestmark = pytest.mark.launched

MOVES_AT, STEPS = 9, 12
CASES: dict[str, tuple[Any, list[int], dict[str, Any]]] = {  # launcher, parts that the run begins with, keys
    "1f1b": (deepspeed, [9, 1], {}),
    "dualpipev": (torchrun, [1, 4, 4, 1], {"schedule": "dualpipev"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param("1f1b", marks=pytest.mark.slow), pytest.param("dualpipev", marks=pytest.mark.longest)]
)
def test_one_command_goes_on_in_better_parts(name: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    launch, bad, keys = CASES[name]
    model = make_checkpoint("llama", num_hidden_layers=8, attention_dropout=0.1)
    keys |= {
        "model_path": str(model),
        "data_path": str(FAQ),
        "eval_data_path": str(FAQ),
        "eval_interval": 6,
        "model_topo": topology((2, 1)),
        "save_interval": MOVES_AT,
        "max_steps": STEPS,
    }
    path = write_config(tmp_path / "moved.yml", rebalance=True, **keys)
    moved, hand = tmp_path / "moved", tmp_path / "hand"
    spec = read_spec(model)
    slow_head = {"0": (1.0, 1.0), "1": (1.0, 1.0), "9": (1e3, 1e3)}
    Calibration.of(load_config(path), spec, slow_head, 1.0).write(moved)
    result = launch(2, "train_ds.py", "--config", path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    measured = Measured.model_validate_json((moved / MEASURED_FILE).read_bytes())
    good = measured.better
    assert (measured.parts, measured.steps, measured.moves) == (bad, (3, 7), 1)
    assert good and good != bad
    assert f"parts {good} would make a step" in result.stdout and "taken at the next checkpoint" in result.stdout
    assert f"rebalance: after step {MOVES_AT} of {STEPS}" in result.stdout
    assert result.stdout.count("prompts: ") == 2, "two starts of one command"
    assert yaml.safe_load((moved / "config.yml").read_text(encoding="utf-8"))["model_topo"]["parts"] == good
    assert len(json.loads((moved / "run.json").read_text(encoding="utf-8"))["earlier"]) == 1

    assert [step for step, _ in curves(moved)["loss"]] == list(range(1, STEPS + 1))
    path = write_config(tmp_path / "hand.yml", **keys)
    for parts, steps in ((bad, MOVES_AT), (good, STEPS)):
        result = launch(2, "train_ds.py", "--config", path, f"model_topo.parts={parts}", f"max_steps={steps}")
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert [line["step"] for line in metrics(moved) if "loss" in line] == list(range(1, STEPS + 1))
    # The last step of each of the two by hand evaluates as well.
    by_hand = [line for line in metrics(hand) if "loss" in line or line["step"] != MOVES_AT]
    assert numbers(metrics(moved)) == numbers(by_hand)


def numbers(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What training and evaluation gave, by step."""
    return [(line["step"], line.get("loss", line.get("eval_loss")), line.get("grad_norm", 0.0)) for line in lines]

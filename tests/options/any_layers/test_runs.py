"""Whole runs of a user's script, through the real launcher: killed, resumed, on other stages, and with mistakes."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from models.checkpoint.layout import resolve
from options.any_layers import load_trained
from options.any_layers.stage import make
from tests.conftest import ROOT
from tests.launching import Launch, error_lines, metrics, start, topology
from tests.models.helpers import assert_same_bits
from tests.options.any_layers.script import Config, layers

pytestmark = pytest.mark.launched

SCRIPT = ROOT / "tests" / "options" / "any_layers" / "script.py"
STEPS = 40


def config(path: Path, dims: tuple[int, int], parts: list[int] | None, **keys: Any) -> Path:
    """A file of keys for the script."""
    values: dict[str, Any] = {
        "save_path": str(path.with_suffix("")),
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "max_steps": STEPS,
        "save_interval": 6,
        "eval_interval": 15,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-2}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}},
        "model_topo": topology(dims, parts),
    }
    path.write_text(json.dumps(values | keys))
    return path


def started(path: Path) -> Launch:
    return start(sys.executable, SCRIPT, path)


def finished(path: Path) -> str:
    done = started(path).end()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "and on" in done.stdout, "the script goes on after the training"
    return done.stdout


def kill_after(step: int, path: Path) -> None:
    launch = started(path)
    launch.until(lambda: len(lines(path)) >= step)
    launch.kill()
    assert len(lines(path)) < STEPS


def lines(path: Path, kind: str = "loss") -> list[dict[str, Any]]:
    """Of the steps; of the evaluations with `eval_loss`."""
    folder = path.with_suffix("")
    return [line for line in metrics(folder) if kind in line] if (folder / "metrics.jsonl").exists() else []


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in lines(path)]


def weights(path: Path, again: bool = False) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, as a script would take them in one process."""
    made = layers(Config(save_path="unused", train_batch_size=1, again=again))
    model = torch.nn.Sequential(*(deepcopy(make(layer, 0)) for layer in made))  # each with a weight of its own
    load_trained(model, path.with_suffix(""))
    return {name: torch.atleast_1d(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("dims", "parts", "keys"),
    [
        pytest.param((2, 1), [2, 3], {"profile_steps": [20, 22]}, id="2x1", marks=pytest.mark.longest),
        pytest.param((1, 2), None, {"bf16": {"enabled": True}}, id="1x2-bf16", marks=pytest.mark.longest),
    ],
)
def test_a_killed_run_goes_on_to_the_last_bit(
    dims: tuple[int, int], parts: list[int] | None, keys: dict[str, Any], tmp_path: Path
) -> None:
    """With dropout, batch statistics and random samples."""
    straight = config(tmp_path / "straight.yml", dims, parts, **keys)
    finished(straight)
    killed = config(tmp_path / "killed.yml", dims, parts, **keys)
    kill_after(9, killed)
    assert "after step 6" in finished(killed)
    assert losses(killed) == losses(straight)
    assert lines(killed, "eval_loss") == lines(straight, "eval_loss")
    assert [line["step"] for line in lines(straight, "eval_loss")] == [15, 30, STEPS]
    assert losses(straight)[-1] < losses(straight)[0]
    assert_same_bits(weights(killed), weights(straight))
    if "profile_steps" in keys:
        assert (tmp_path / "killed" / "timeline.json").exists()


@pytest.mark.longest
def test_a_run_goes_on_with_other_stages(tmp_path: Path) -> None:
    before = config(tmp_path / "run.yml", (2, 1), [2, 3], max_steps=6)
    finished(before)
    state = weights(before)
    after = config(tmp_path / "run.yml", (1, 1), None, max_steps=7)
    assert "dividing its weights and optimizer states anew" in finished(after)
    assert [line["step"] for line in lines(after)] == list(range(1, 8))
    found = weights(after)
    assert set(found) == set(state)
    changed = {name: float((found[name].float() - state[name].float()).abs().max()) for name in found}
    assert 0 < changed["0.weight"] < 0.05, "one step on from the weights of the checkpoint"
    assert "nothing to train" in finished(after)


@pytest.mark.longest
def test_a_shared_weight_goes_on_from_one_stage_to_two_and_back(tmp_path: Path) -> None:
    path, steps = tmp_path / "run.yml", 0
    for dims, parts in [((1, 1), None), ((2, 1), [3, 4]), ((1, 1), None), ((3, 1), [1, 2, 4])]:
        steps += 3
        finished(config(path, dims, parts, max_steps=steps, again=True))
        state = weights(path, again=True)
        for name in ("weight", "bias"):
            assert torch.equal(state[f"1.{name}"], state[f"5.{name}"])
    assert [line["step"] for line in lines(path)] == list(range(1, steps + 1))


@pytest.mark.slow
def test_mistakes_end_in_one_line(tmp_path: Path) -> None:
    path = config(tmp_path / "run.yml", (2, 1), [2, 3], max_steps=6)
    finished(path)
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"width": 32, "taken": 32}, "width: 32, but"),
        ({"save_path": str(tmp_path / "other"), "taken": 8}, "layers: layer 4 (Linear) with [4, 16] float32: "),
    ]
    for keys, expected in mistakes:
        done = started(config(path, (2, 1), [2, 3], **{"max_steps": 6, **keys})).end()
        assert done.returncode != 0
        assert [line.partition("error: ")[2].partition(expected)[0] for line in error_lines(done)] == [""], expected
    assert resolve(tmp_path / "run", layers=True).name == "step-000006"

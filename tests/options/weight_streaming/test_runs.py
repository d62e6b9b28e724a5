"""Runs under weight streaming, through the real launcher: killed and resumed, from and to a pipeline, nothing left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import deepspeed, metrics, start_deepspeed, steps_done, topology, write_config
from tests.models.helpers import assert_same_bits
from tests.training.starts import weights

pytestmark = [pytest.mark.launched, pytest.mark.slow]

LR, COMPARED = 1e-3, ("loss", "grad_norm")
TEXTS = ["Which file holds the config?", "configs/ds_config_pp.yml", "How many stages?", "As many as dims says."]
STREAMED: dict[str, Any] = {"schedule": "weight_streaming", "model_topo": topology((2, 1))}
PIPELINE: dict[str, Any] = {"model_topo": topology((1, 1)), "zero_optimization": {"stage": 1}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "states": {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    "chunks": {"row_chunk": 16, "max_seq_len": 64},
    # The scale falls in the first step, and is doubled after every second one.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 2}},
}
CLOSE, LAST = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3, "chunks": 1e-5}, pytest.mark.longest


@pytest.fixture(scope="module")
def base(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", tie_word_embeddings=True)


def config(name: str, folder: Path, base: Path, **keys: Any) -> Path:
    records = folder / "records.json"
    records.write_text(json.dumps([{"text": f"{text} {number}"} for number in range(2) for text in TEXTS]))
    defaults: dict[str, Any] = {
        "model_path": str(base),
        "data_path": str(records),
        "save_path": str(folder / name),
        "train_batch_size": 8,
        "max_steps": 6,
        "save_interval": 3,
        "keep_last": 9,
        "pack_len": 64,  # else the number of stages chooses it
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "scheduler": None,
    }
    return write_config(folder / f"{name}.yml", **(defaults | keys))


def train(path: Path, processes: int) -> str:
    result = deepspeed(processes, "train_ds.py", "--config", path)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "precision", ["states", *(pytest.param(name, marks=LAST) for name in ("bf16", "fp16", "chunks"))]
)
def test_a_killed_run_goes_on_to_the_last_bit(precision: str, base: Path, tmp_path: Path) -> None:
    folder, before = tmp_path, set(os.listdir("/dev/shm"))
    keys = STREAMED | PRECISIONS[precision]
    printed = train(config("straight", folder, base, **keys), 2)
    assert "turns: " in printed and "all recompute" in printed
    path = config("killed", folder, base, **keys)
    launch = start_deepspeed(2, "train_ds.py", "--config", path)
    launch.until(lambda: steps_done(path) >= 4)
    launch.kill()
    assert "resumed: " in train(path, 2)
    for found, expected in zip(metrics(folder / "killed"), metrics(folder / "straight"), strict=True):
        assert [found.get(key) for key in COMPARED] == [expected.get(key) for key in COMPARED]
    assert_same_bits(weights(folder / "killed"), weights(folder / "straight"))
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=LAST) for name in ("bf16", "fp16", "chunks"))]
)
def test_a_pipeline_goes_on_there_and_back(precision: str, base: Path, tmp_path: Path) -> None:
    """Three steps of a pipeline, three in turns, and three of a pipeline again; in fp16 with one loss scale."""
    folder = tmp_path
    parts = [(PIPELINE, 1, 9), (STREAMED, 2, 6), (PIPELINE, 1, 9)]
    folders = ["pipeline", "there", "back"]
    for number, (name, (keys, processes, steps)) in enumerate(zip(folders, parts, strict=True)):
        taken_up = {"resume": str(folder / folders[number - 1] / f"step-{3 * number:06d}")} if number else {}
        printed = train(
            config(name, folder, base, **keys, **PRECISIONS[precision], **taken_up, max_steps=steps), processes
        )
        assert ("dividing its weights and optimizer states anew" in printed) == bool(number)
    expected = {line["step"]: line for line in metrics(folder / "pipeline") if "loss" in line}
    for line in (each for name in folders[1:] for each in metrics(folder / name) if "loss" in each):
        assert [line[key] for key in COMPARED] == pytest.approx(
            [expected[line["step"]][key] for key in COMPARED], rel=CLOSE[precision], nan_ok=True
        )
    # In 16 bits AdamW makes whole steps of roundings.
    for name, weight in weights(folder / "back", 9).items() if precision not in ("bf16", "fp16") else ():
        torch.testing.assert_close(weight, weights(folder / "pipeline", 9)[name], atol=LR * 9e-3, rtol=1e-5)

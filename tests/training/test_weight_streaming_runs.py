"""Runs under weight streaming, through the real launcher: killed and resumed, from and to a pipeline, nothing left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.conversion.to_huggingface import pp_to_hg
from tests.launching import deepspeed, error_lines, metrics, start_deepspeed, steps_done, topology, write_config
from tests.models.helpers import assert_same_bits
from tests.training.starts import weights

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS, LR = 6, 1e-3
TEXTS = ["Which file holds the config?", "configs/ds_config_pp.yml", "How many stages?", "As many as dims says."]
STREAMED: dict[str, Any] = {"schedule": "weight_streaming", "model_topo": topology((2, 1))}
PIPELINE: dict[str, Any] = {"model_topo": topology((1, 1))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streaming-runs")


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
        "max_steps": STEPS,
        "save_interval": 3,
        "keep_last": 9,
        "eval_share": 0.2,
        "pack_len": 64,  # else the number of stages chooses it
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "scheduler": None,
    }
    return write_config(folder / f"{name}.yml", **(defaults | keys))


def train(path: Path, processes: int) -> str:
    result = deepspeed(processes, "train_ds.py", "--config", path)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def run(folder: Path, base: Path) -> Path:
    before = set(os.listdir("/dev/shm"))
    printed = train(config("run", folder, base, **STREAMED), 2)
    assert "turns: " in printed and "all recompute" in printed
    assert set(os.listdir("/dev/shm")) <= before
    return folder / "run"


@pytest.fixture(scope="module")
def pipeline(folder: Path, base: Path) -> Path:
    train(config("pipeline", folder, base, **PIPELINE), 1)
    return folder / "pipeline"


def test_a_run_is_a_pipelines(run: Path, pipeline: Path, tmp_path: Path) -> None:
    for found, expected in zip(metrics(run), metrics(pipeline), strict=True):
        assert found.keys() == expected.keys()
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in expected:
                assert found[key] == pytest.approx(expected[key], rel=1e-5)
    close(weights(run), weights(pipeline))
    pp_to_hg(run, tmp_path / "hf")


def test_a_killed_run_goes_on_to_the_last_bit(run: Path, folder: Path, base: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    path = config("killed", folder, base, **STREAMED)
    launch = start_deepspeed(2, "train_ds.py", "--config", path)
    launch.until(lambda: steps_done(path) >= 4)
    launch.kill()
    assert set(os.listdir("/dev/shm")) <= before
    assert "resumed: " in train(path, 2)
    for found, expected in zip(metrics(folder / "killed"), metrics(run), strict=True):
        assert [found.get(key) for key in ("loss", "grad_norm")] == [expected.get(key) for key in ("loss", "grad_norm")]
    assert_same_bits(weights(folder / "killed"), weights(run))


@pytest.mark.parametrize("first", ["streamed", "pipeline"])
def test_either_goes_on_where_the_other_ended(first: str, pipeline: Path, folder: Path, base: Path) -> None:
    both = [(STREAMED, 2), (PIPELINE | {"zero_optimization": {"stage": 1}}, 1)]
    for steps, (keys, processes) in zip((3, STEPS), both if first == "streamed" else reversed(both), strict=True):
        printed = train(config(f"from-{first}", folder, base, **keys, max_steps=steps), processes)
    assert "dividing its weights and optimizer states anew" in printed
    close(weights(folder / f"from-{first}"), weights(pipeline))


def test_other_hosts_and_needless_keys_are_refused(folder: Path, base: Path) -> None:
    result = deepspeed(
        1, "train_ds.py", "--config", config("refused", folder, base, **STREAMED, offload_gradients=True)
    )
    assert result.returncode and error_lines(result)[-1].count("offload_gradients: ") == 1


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=LR * STEPS * 1e-3, rtol=1e-5, msg=name)

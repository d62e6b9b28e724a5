"""Runs with gdGPT's two files, their paths and sizes replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FAQ
from tests.launching import metrics, supervised, topology, write_config
from tests.training.config.test_deepspeed_keys import PIPELINE, ZERO

STAGES = {"model_topo": topology((2, 1))}


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "door", "ignored"),
    [
        (PIPELINE | STAGES, "train_ds.py", "no effect here: fp16.auto_cast, fp16.fused_optimizer\n"),
        pytest.param(ZERO, "train_ds_zero.py", "no effect here: fp16.auto_cast\n", marks=pytest.mark.longest),
    ],
    ids=["pipeline", "zero"],
)
def test_gdgpts_file_trains_and_names_once_what_has_no_effect(
    keys: dict[str, Any], door: str, ignored: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_checkpoint("llama", num_hidden_layers=2)
    paths = {"model_path": str(model), "data_path": str(FAQ), "save_path": str(tmp_path / "run")}
    sizes = {"max_seq_len": 64, "max_steps": 1, "train_batch_size": 4}
    result = supervised(2, door, "--config", write_config(tmp_path / "run.yml", **keys | paths | sizes))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.count(ignored) == 1
    assert len(metrics(tmp_path / "run")) == 1

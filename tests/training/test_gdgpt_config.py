"""A run with gdGPT's pipeline file, its paths and sizes replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FAQ
from tests.launching import deepspeed, metrics, topology, write_config
from tests.training.config.test_deepspeed_keys import PIPELINE


@pytest.mark.launched
@pytest.mark.slow
def test_gdgpts_pipeline_file_trains_and_names_once_what_has_no_effect(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_checkpoint("llama", num_hidden_layers=2)
    paths = {"model_path": str(model), "data_path": str(FAQ), "save_path": str(tmp_path / "run")}
    sizes = {"model_topo": topology((2, 1)), "max_seq_len": 64, "max_steps": 1, "train_batch_size": 4}
    result = deepspeed(2, "train_ds.py", "--config", write_config(tmp_path / "run.yml", **PIPELINE | paths | sizes))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.count("no effect here: fp16.auto_cast, fp16.fused_optimizer\n") == 1
    assert len(metrics(tmp_path / "run")) == 1

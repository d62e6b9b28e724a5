"""`parts: auto` in a run: what was measured counts, every rank divides alike, and the saved config says how."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from models.api import read_spec
from options import load_config
from options.planner.inputs import Workload
from options.planner.timing import calibrate
from tests.conftest import write_records
from tests.launching import metrics, supervised, topology, write_config

pytestmark = [pytest.mark.launched, pytest.mark.slow]


def test_a_run_divides_by_measured_costs(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = make_checkpoint("llama", num_hidden_layers=4)
    data = tmp_path / "records.json"
    write_records(data, 8)
    path = write_config(
        tmp_path / "run.yml",
        model_path=str(model),
        data_path=str(data),
        model_topo=topology((2, 1)),
        max_steps=1,
        use_grad_ckpt="auto",
    )
    config = load_config(path)
    found = calibrate(config, read_spec(model), Workload.assumed(config))
    found.layers["5"] = (1e6, 1e6)  # a very slow head
    found.write(tmp_path / "run")
    result = supervised(2, "train_ds.py", "--config", path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "in 2 stages of [5, 1]" in result.stdout
    assert "parts: auto, by measured costs" in result.stdout
    assert result.stdout.count("gradient checkpointing: auto") == 1
    saved = yaml.safe_load((tmp_path / "run" / "config.yml").read_text(encoding="utf-8"))
    assert saved["model_topo"]["parts"] == [5, 1]
    assert json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["topology"]["parts"] == [5, 1]
    assert len(metrics(tmp_path / "run")) == 1

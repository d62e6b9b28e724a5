"""Tensor parallelism by the entry points: a run with all that a user sees of it, and what is refused in one line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from models import load_model
from options import load_config
from tests.conftest import write_records
from tests.launching import error_lines, metrics, run, supervised, write_config
from tests.ranks import Ranks
from training.checkpoint.folder import step_folder
from training.errors import ConfigError

AXES = ["pipe", "data", "model"]


def grid(*dims: int, **topo: Any) -> dict[str, Any]:
    return {"process_topology": {"axes": AXES, "dims": list(dims)}} | topo


@pytest.fixture
def keys(make_checkpoint: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    records = tmp_path / "records.json"
    write_records(records, 16)
    model = make_checkpoint("llama", attention_dropout=0.1)
    return {"model_path": str(model), "data_path": str(records), "n_epoches": 3, "eval_share": 0.1}


@pytest.mark.launched
@pytest.mark.slow
def test_a_run_and_what_comes_of_it(ranks: Ranks, keys: dict[str, Any], tmp_path: Path) -> None:
    more = {"save_interval": 2, "keep_last": 5, "eval_interval": 2, "export_hf": True}
    path = write_config(tmp_path / "run.yml", **keys, **more, model_topo=grid(1, 1, 2))
    save_path = path.with_suffix("")
    assert ranks.train(2, path)["error"] is None
    expected = metrics(save_path)
    last = expected[-1]["step"]
    assert not list(save_path.glob("step-*/*model_0*-model_states.pt"))
    # Step by step again from the first checkpoint, to the last bit, although heads drop apart.
    for folder in [step_folder(save_path, step) for step in range(3, last + 1)]:
        shutil.rmtree(folder, ignore_errors=True)
    assert ranks.train(2, path)["error"] is None
    assert [line.get("loss") for line in metrics(save_path)] == [line.get("loss") for line in expected]
    exported = AutoModelForCausalLM.from_pretrained(save_path / "hf")
    trained = load_model(step_folder(save_path, last))
    assert sum(weight.numel() for weight in exported.parameters()) == sum(
        weight.numel() for weight in trained.parameters()
    )
    planned = run(sys.executable, "train_ds.py", "--config", path, "--plan")
    assert "all-reduces of hidden states" in " ".join(planned.stdout.split())
    other = ranks.train(2, write_config(path, **keys | {"n_epoches": 4}, **more, model_topo=grid(2, 1, 1)))
    assert other["error"] is None and "1 replica, 2 processes to a layer; dividing" in other["printed"]


@pytest.mark.launched
@pytest.mark.longest  # tests/models/parallel/test_tensor.py has the reasons
def test_a_model_that_cannot_be_shared_is_refused(
    keys: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    keys["model_path"] = str(make_checkpoint("llama", num_key_value_heads=1))
    path = write_config(tmp_path / "run.yml", **keys, model_topo=grid(1, 1, 2))
    (message,) = set(error_lines(supervised(2, "train_ds.py", "--config", path)))
    assert (
        "model_topo.process_topology: 1 heads of keys (num_key_value_heads) are not enough for 2 processes" in message
    )


def test_zero_has_no_model_axis(keys: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path / "run.yml", **keys, model_topo=grid(1, 1, 2))
    with pytest.raises(ConfigError, match="2 processes to a layer are a pipeline's; expected no model axis"):
        load_config(str(path), []).check_entry_point(in_stages=False)


def test_peers_of_any_order_of_axes(keys: dict[str, Any], tmp_path: Path) -> None:
    topo = {"process_topology": {"axes": ["model", "pipe", "data"], "dims": [2, 2, 2]}}
    path = write_config(tmp_path / "run.yml", **keys, model_topo=topo)
    found = load_config(str(path), []).model_topo
    assert [found.first_peer(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]

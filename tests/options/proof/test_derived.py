"""`--prove` of derived families: schedules, replicas, packed rows, kill and resume are exact for them too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from options.proof.command import CERTIFICATE
from tests.conftest import FAQ, save_tokenizer
from tests.launching import run, topology, write_config
from tests.models.derived.cases import write_small

RUNS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {"model_topo": topology((2, 1))},
    "gpt_oss": {"model_topo": topology((2, 1)), "schedule": "dualpipev"},
    "deepseek_v3": {"model_topo": topology((2, 2)), "use_grad_ckpt": True},
    "qwen3_next": {"model_topo": topology((1, 2)), "bf16": {"enabled": True}},
    "glm_moe_dsa": {"model_topo": topology((2, 1))},
    "gemma4_text": {"model_topo": topology((2, 1)), "schedule": "dualpipev"},
}


@pytest.mark.launched
@pytest.mark.longest  # test_prove.py has a proof for `make test-slow`
@pytest.mark.parametrize("model_type", RUNS)
def test_a_derived_family_is_proved(model_type: str, tmp_path: Path) -> None:
    write_small(tmp_path / "model", model_type)
    save_tokenizer(tmp_path / "model")
    keys: dict[str, Any] = {
        "model_path": str(tmp_path / "model"),
        "data_path": str(FAQ),
        "save_path": str(tmp_path / "run"),
        "train_batch_size": 16,
        "max_seq_len": 256,
    }
    config = write_config(tmp_path / "run.yml", **keys | RUNS[model_type])
    result = run(sys.executable, "train_ds.py", "--config", config, "--prove")
    assert result.returncode == 0, result.stdout + result.stderr
    certificate = json.loads((tmp_path / "run" / CERTIFICATE).read_text(encoding="utf-8"))
    assert certificate["proved"] and all(row["holds"] for row in certificate["rows"])

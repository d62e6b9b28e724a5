"""`--prove` of derived families: schedules, replicas, packed rows, kill and resume are exact for them too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

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
    "qwen3_5_text": {"model_topo": topology((2, 1)), "row_chunk": 64},
}


class Proved(NamedTuple):
    """A proof that was tried: its exit code, what it printed, and the verdict on each row of its table."""

    code: int
    printed: str
    rows: dict[str, bool]


def prove(model_type: str, folder: Path, script: str = "train_ds.py", fault: str = "") -> Proved:
    """Try to prove a run of a family's small model."""
    write_small(folder / "model", model_type)
    save_tokenizer(folder / "model")
    keys: dict[str, Any] = {
        "model_path": str(folder / "model"),
        "data_path": str(FAQ),
        "save_path": str(folder / "run"),
        "train_batch_size": 16,
        "max_seq_len": 256,
    }
    config = write_config(folder / "run.yml", **keys | RUNS[model_type])
    result = run(sys.executable, script, "--config", config, "--prove", FAULT=fault)
    printed, certificate = result.stdout + result.stderr, folder / "run" / CERTIFICATE
    assert certificate.is_file(), printed
    rows = json.loads(certificate.read_text(encoding="utf-8"))["rows"]
    return Proved(result.returncode, printed, {row["what"]: row["holds"] for row in rows})


@pytest.mark.launched
@pytest.mark.longest  # test_prove.py has a proof for `make test-slow`
@pytest.mark.parametrize("model_type", RUNS)
def test_a_derived_family_is_proved(model_type: str, tmp_path: Path) -> None:
    proved = prove(model_type, tmp_path)
    assert proved.code == 0 and all(proved.rows.values()), proved.printed


@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize("fault", ["state_not_reset", "tail_short"])
def test_a_fault_of_states_in_chunks_is_found(fault: str, tmp_path: Path) -> None:
    proved = prove("qwen3_5_text", tmp_path, "tests/workers/unproved.py", fault)
    assert proved.code == 1 and not proved.rows["loss"], proved.printed

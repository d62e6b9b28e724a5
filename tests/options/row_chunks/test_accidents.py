"""A run that is killed between two chunks of a row goes on, to the bits of a run that nobody killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import metrics, start, topology, write_config
from tests.models.helpers import assert_same_bits
from tests.ranks import Ranks, samples_of
from tests.training.starts import weights

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS, SAVED = 4, 2


def test_a_kill_within_a_row_changes_no_bit(ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text("\n".join(map(json.dumps, samples_of([200] * 16))), encoding="utf-8")
    keys: dict[str, Any] = {
        "model_path": str(make_checkpoint("llama", tie_word_embeddings=False)),
        "data_path": [{"path": str(records), "format": "tokens"}],
        "model_topo": topology((2, 1)),
        "max_steps": STEPS,
        "save_interval": SAVED,
        "max_restarts": 1,
        "train_batch_size": 4,
        "packing": False,
        "row_chunk": 40,  # five of them a row
    }
    straight, disturbed = (write_config(tmp_path / f"{name}.yml", **keys) for name in ("straight", "disturbed"))
    assert ranks.train(2, straight)["error"] is None

    # The last stage, in the third step of each start; the second start has two.
    fault = {"FAULT": f"dies_within:1:{SAVED + 1}"}
    result = start(sys.executable, "tests/workers/faulty.py", "--config", disturbed, **fault).end()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "restart 1 of 1: this machine: a process was killed by SIGKILL" in result.stderr

    runs = [path.with_suffix("") for path in (disturbed, straight)]
    found, expected = ([(line["step"], line["loss"]) for line in metrics(run)] for run in runs)
    assert found == expected and len(found) == STEPS
    assert_same_bits(*(weights(run, STEPS) for run in runs))

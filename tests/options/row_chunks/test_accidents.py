"""A run that is killed between two chunks of a row goes on, to the bits of a run that nobody killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import topology
from tests.ranks import Ranks, samples_of
from tests.restarts import check_a_kill_changes_no_bit

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
        "train_batch_size": 4,
        "packing": False,
        "row_chunk": 40,  # five of them a row
    }
    # The last stage, in the third step of each start; the second start has two.
    check_a_kill_changes_no_bit(ranks, tmp_path, f"dies_within:1:{SAVED + 1}", **keys)

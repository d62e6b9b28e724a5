"""A run on images that is killed goes on, to the bits of a run that nobody killed; what it saw may not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHARED
from tests.launching import topology, write_config
from tests.ranks import Ranks
from tests.restarts import check_a_kill_changes_no_bit

VISION = SHARED / "golden" / "vision"
pytestmark = [
    pytest.mark.launched,
    pytest.mark.slow,
    pytest.mark.skipif(not VISION.is_dir(), reason="shared/golden/vision is not here"),
]

STEPS, SAVED = 4, 2


def keys_of(name: str) -> dict[str, Any]:
    return {
        "model_path": str(VISION / f"{name}-tiny"),
        "data_path": str(VISION / f"{name}-tiny" / "records.json"),
        "model_topo": topology((2, 1)),
        "max_steps": STEPS,
        "save_interval": SAVED,
        "train_batch_size": 4,
        "vision": {"train": "all", "max_pixels": 1568},
    }


def test_a_kill_changes_no_bit_and_other_pixels_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    keys = keys_of("qwen2_5_vl")
    # The stage with the tower, whose worker has decoded the next step's images.
    straight = check_a_kill_changes_no_bit(ranks, tmp_path, f"dies:0:{SAVED + 1}", **keys)

    changed = {"vision": keys["vision"] | {"max_pixels": 3136}, "save_path": str(straight.with_suffix(""))}
    refused = ranks.train(2, write_config(tmp_path / "other.yml", **keys | changed))["error"]
    assert refused is not None and "vision.max_pixels" in json.dumps(refused)

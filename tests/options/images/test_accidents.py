"""A run on images that is killed goes on, to the bits of a run that nobody killed; what it saw may not change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoint.layout import layer_file
from tests.conftest import SHARED
from tests.launching import metrics, start, topology, write_config
from tests.models.helpers import assert_same_bits
from tests.ranks import Ranks
from training.checkpoint.folder import step_folder

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


def layers(run: Path) -> dict[str, Tensor]:
    folder, found = step_folder(run, STEPS), dict[str, Tensor]()
    for number in range(4):
        layer = torch.load(folder / layer_file(number), weights_only=True)
        found |= {f"{number}.{name}": weight for name, weight in layer.items()}
    return found


def test_a_kill_changes_no_bit_and_other_pixels_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    keys = keys_of("qwen2_5_vl")
    straight = write_config(tmp_path / "straight.yml", **keys)
    disturbed = write_config(tmp_path / "disturbed.yml", max_restarts=1, **keys)
    assert ranks.train(2, straight)["error"] is None

    # The stage with the tower, whose worker has decoded the next step's images.
    fault = {"FAULT": f"dies:0:{SAVED + 1}"}
    result = start(sys.executable, "tests/workers/faulty.py", "--config", disturbed, **fault).end()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "restart 1 of 1: this machine: a process was killed by SIGKILL" in result.stderr

    runs = [path.with_suffix("") for path in (disturbed, straight)]
    found, expected = ([(line["step"], line["loss"]) for line in metrics(run)] for run in runs)
    assert found == expected and len(found) == STEPS
    assert_same_bits(*map(layers, runs))

    other = write_config(
        tmp_path / "other.yml", **keys | {"vision": keys["vision"] | {"max_pixels": 3136}, "save_path": str(runs[1])}
    )
    refused = ranks.train(2, other)["error"]
    assert refused is not None and "vision.max_pixels" in json.dumps(refused)

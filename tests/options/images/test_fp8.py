"""Runs on images in fp8, emulated on a CPU, beside the same in bf16; the tower keeps its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models.conversion.to_huggingface import pp_to_hg
from tests.golden_vision import folder as golden_folder
from tests.golden_vision import needs_golden
from tests.launching import topology
from tests.options.images.test_runs import all_inputs, layers, mean_loss
from tests.ranks import Ranks, job
from tests.training.starts import STEPS, TAKEN_UP_AT, steps
from training.checkpoint.folder import step_folder

pytestmark = [pytest.mark.launched, pytest.mark.slow, pytest.mark.longest, needs_golden]

NEAR = 5e-3  # relative, of losses


# Whose layers have multiples of 16 features, which fp8 needs.
@pytest.mark.parametrize("name", ["qwen2_5_vl"])
def test_losses_stay_near_those_of_bf16_and_a_run_goes_on(name: str, ranks: Ranks, tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "model_path": str(golden_folder(name)),
        "data_path": str(golden_folder(name) / "records.json"),
        "model_topo": topology((2, 1)),
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "max_steps": STEPS,
        "save_interval": TAKEN_UP_AT,
        "vision": {"train": "all"},
        "bf16": {"enabled": True},
    }
    eight = shared | {"fp8": {"enabled": True}}
    again = eight | {"resume": str(step_folder(tmp_path / "fp8", TAKEN_UP_AT))}
    asked = {"bf16": shared, "fp8": eight, "again": again}
    found = ranks.jobs([job(tmp_path, each, **keys) for each, keys in asked.items()], tmp_path, "fp8")
    assert not any(outcome["error"] or outcome["code"] for outcome in found.values()), found

    bf16, fp8 = ([line["loss"] for line in steps(tmp_path / each).values()] for each in ("bf16", "fp8"))
    assert fp8 == pytest.approx(bf16, rel=NEAR) and fp8 != bf16
    torch.testing.assert_close(layers(tmp_path / "again"), layers(tmp_path / "fp8"), rtol=0, atol=0)

    pp_to_hg(step_folder(tmp_path / "fp8", TAKEN_UP_AT), tmp_path / "exported")
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    with torch.no_grad():
        after = float(mean_loss(model, all_inputs(model, golden_folder(name))))
    assert fp8[TAKEN_UP_AT] == pytest.approx(after, rel=NEAR)

"""What the layers of derived families compute is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.api import read_spec
from options.planner.layer_costs import LayerCase, work_of
from tests.models.derived.cases import TRAITS, write_small
from tests.models.derived.test_derived import own_cache

__all__ = ["own_cache"]  # a fixture
QUICK = {"gemma4_text", "gpt2", "gpt_neox", "phi", "smollm3"}
CASES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TRAITS]


@pytest.mark.parametrize("model_type", CASES)
def test_what_every_block_does_is_counted(model_type: str, tmp_path: Path) -> None:
    write_small(tmp_path, model_type)
    spec = read_spec(tmp_path)
    for layer in range(spec.n_layers - 1):
        work = work_of(spec, LayerCase(layer, 1, 64, torch.bfloat16), compiled=True)
        assert layer == 0 or sum(each.flops for each in work.forward) > 2 * 64 * spec.config.hidden_size**2

"""Steps that move less give DeepSpeed's numbers: sums that are not set to zero, clipping as a part of the update.

All is equal to the last bit where DeepSpeed is told not to round sums that go nowhere, and nothing is clipped: clipping
divides where DeepSpeed multiplies by the inverse.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.launching import topology
from tests.ranks import Ranks
from tests.training.engine.test_clipping import samples
from training.engine.clipping import clip

NORM = 0.5
ADAMW = {"type": "AdamW", "params": {"lr": 1.0e-4, "weight_decay": 0.1}}
BF16 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
CLIPPED = {"gradient_clipping": NORM}
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "bf16": ((2, 1), BF16 | CLIPPED),
    "bf16-unclipped": ((2, 1), BF16 | {"gradient_clipping": 0}),
    "bf16-replicas": ((1, 2), BF16 | CLIPPED),
    "bf16-dualpipev": ((2, 1), BF16 | CLIPPED | {"schedule": "dualpipev"}),
    "fp16": ((2, 1), {"fp16": {"enabled": True, "initial_scale_power": 8}} | CLIPPED),
    "fp32": ((2, 1), CLIPPED),
    "fp32-unsharded": ((2, 1), CLIPPED | {"zero_optimization": {"stage": 0}}),
}
BY_BUCKET = ("fp16", "fp32")  # whose optimizer of DeepSpeed's copies gradients into a bucket and out of it
IN_EVERY_RUN = ("bf16", "fp32-unsharded")
UNDER_TEST = [pytest.param(name, id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.longest) for name in CASES]


@pytest.mark.launched
@pytest.mark.parametrize("case", UNDER_TEST)
def test_steps_are_those_of_deepspeed(
    case: str, ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    dims, keys = CASES[case]
    (tmp_path / "samples.json").write_text(json.dumps(samples()))
    stages = 2 * dims[0] if "schedule" in keys else dims[0]
    config = {
        "model_path": str(make_checkpoint("llama", tie_word_embeddings=True)),
        "data_path": str(tmp_path / "samples.json"),
        "save_path": str(tmp_path),
        "optimizer": ADAMW,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "n_epoches": 2,
        "model_topo": topology(dims, {1: [5], 2: [3, 2], 4: [1, 2, 1, 1]}[stages]),
    } | keys
    both = [{"name": name, "config": config, "deepspeed": name == "deepspeed"} for name in ("deepspeed", "pipetune")]
    ranks.run(2, "optimizer_step", both, tmp_path)
    for rank in range(2):
        expected, found = (load_file(tmp_path / f"{each['name']}.{rank}.safetensors") for each in both)
        assert found.keys() == expected.keys()
        by_deepspeed, here = (int(each.pop("reduction")) for each in (expected, found))
        if dims[1] == 1 and case not in BY_BUCKET:  # there is nothing to sum: no buffer is copied, not even onto itself
            assert here == 0 < by_deepspeed
        assert any(name.startswith("average.") for name in found)
        assert expected["norms"].min() > 2 * NORM, "little was clipped"
        tolerance = 0.0 if "unclipped" in case else 1e-6
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], atol=tolerance, rtol=tolerance, msg=told(name))


def told(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def test_what_is_fused_divides_and_what_is_not_is_multiplied() -> None:
    found = {}
    for fused in (True, False):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(1000))
        weight.grad = torch.randn(1000)
        norm = weight.grad.norm()
        optimizer = torch.optim.AdamW([weight], fused=fused)
        clip(optimizer, [weight], NORM, norm)
        assert weight.grad.norm().isclose(norm if fused else torch.tensor(NORM))
        optimizer.step()
        found[fused] = optimizer.state[weight]["exp_avg"]
        clip(optimizer, [weight], 1e6, norm)
        assert getattr(optimizer, "grad_scale", None) is None
    torch.testing.assert_close(found[True], found[False], rtol=1e-6, atol=0)

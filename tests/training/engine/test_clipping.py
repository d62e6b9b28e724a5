"""Gradient clipping over all stages is that of one process, wherever DeepSpeed clips: fp32 and bf16, with and without
ZeRO.

SGD alone takes the gradient's length into its step: AdamW and Lion walk nearly as far with a gradient that was scaled
wrongly. The model is tied, so a norm that counted both copies of the weight would be too large. Stages may
have different numbers of parameter groups, and `no_wd_kws` may match one name of the tied weight only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.closeness import assert_near
from tests.launching import topology
from tests.ranks import Ranks

pytestmark = pytest.mark.launched

NORM = 0.5
SGD = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.5}}
DECAY = {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.02}
OFFLOAD = {
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
WITHOUT_ZERO = {"zero_optimization": {"stage": 0}}
BF16 = {"bf16": {"enabled": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": SGD},
    "sgd_without_zero": {"optimizer": SGD} | WITHOUT_ZERO,
    "sgd_bf16": {"optimizer": SGD} | BF16,
    "sgd_bf16_without_zero": {"optimizer": SGD} | BF16 | WITHOUT_ZERO,
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1.0e-3}}},
    "uneven_groups": {"optimizer": SGD | {"no_wd_kws": ["norm"], "params": DECAY}},
    "uneven_groups_bf16": {"optimizer": SGD | {"no_wd_kws": ["norm"], "params": DECAY}} | BF16,
    "uneven_groups_offload": {"optimizer": SGD | {"no_wd_kws": ["norm"], "params": DECAY}} | OFFLOAD,
    "one_end_exempt": {"optimizer": SGD | {"no_wd_kws": ["embed"], "params": DECAY}},
    "adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 1.0e-2}}} | WITHOUT_ZERO,
}


TOPOLOGIES = {
    (1, 1): ([5], list(VARIANTS)),
    (2, 1): ([1, 4], list(VARIANTS)),  # no norm on the first stage
    (2, 2): ([2, 3], ["sgd", "sgd_without_zero"]),
}
CASES = [(variant, dims) for dims, (_, variants) in TOPOLOGIES.items() for variant in variants if dims != (1, 1)]
IN_EVERY_RUN = ("sgd", "sgd_bf16_without_zero", "uneven_groups", "adafactor")
UNDER_TEST = [
    pytest.param(variant, dims, id=f"{variant}-{dims}", marks=() if variant in IN_EVERY_RUN else pytest.mark.longest)
    for variant, dims in CASES
]


class Outcome(NamedTuple):
    losses: torch.Tensor
    norms: torch.Tensor


Outcomes = dict[tuple[str, tuple[int, int]], Outcome]


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks,
    make_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    asked: set[str],
) -> Outcomes:
    """Every case that this session asks for, and one process's for it."""
    chosen = [case for case in CASES if f"{case[0]}-{case[1]}" in asked]
    chosen += [(variant, (1, 1)) for variant in dict.fromkeys(variant for variant, _ in chosen)]
    folder = tmp_path_factory.mktemp("clipping")
    model = make_checkpoint("llama", tie_word_embeddings=True)
    (folder / "samples.json").write_text(json.dumps(samples()))
    outcomes: Outcomes = {}
    for dims, (parts, _) in TOPOLOGIES.items():
        variants = [variant for variant, where in chosen if where == dims]
        if not variants:
            continue
        config = {
            "model_path": str(model),
            "data_path": str(folder / "samples.json"),
            "save_path": str(folder),
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2 // dims[1],
            "n_epoches": 2,
            "gradient_clipping": NORM,
            "model_topo": topology(dims, parts),
        }
        cases = [{"name": variant, "config": config | VARIANTS[variant]} for variant in variants]
        ranks.run(dims[0] * dims[1], "clipping", cases, folder)
        for variant in variants:
            found = json.loads((folder / f"{variant}.json").read_text())
            outcomes[variant, dims] = Outcome(torch.tensor(found["losses"]), torch.tensor(found["norms"]))
    return outcomes


def samples() -> list[dict[str, list[int]]]:
    """Sixteen samples of 5 to 60 tokens, the first third of each without loss."""
    generator = random.Random(0)
    samples = []
    for length in (5, 60, 17, 8, 41, 23, 55, 12) * 2:
        ids = [generator.randrange(3, 512) for _ in range(length)]
        samples.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return samples


@pytest.mark.parametrize(("variant", "dims"), UNDER_TEST)
def test_clipped_steps_are_those_of_one_process(variant: str, dims: tuple[int, int], outcomes: Outcomes) -> None:
    expected, found = outcomes[variant, (1, 1)], outcomes[variant, dims]
    dtype = torch.bfloat16 if "bf16" in variant else torch.float32
    assert expected.norms.min() > 2 * NORM, "little was clipped"
    assert_near(found.losses, expected.losses, dtype, "means")
    assert_near(found.norms, expected.norms, dtype, "norms")

"""Replicas that sum their gradients while they compute take DeepSpeed's steps, which sums them afterwards.

An epoch's last batch is smaller, so no two steps need have as many micro-batches. `reduce_scatter` is DeepSpeed's
default: naming it leaves the sums to DeepSpeed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.launching import topology
from tests.ranks import Ranks
from tests.training.engine.test_clipping import samples

pytestmark = pytest.mark.launched

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
DUALPIPEV = {"schedule": "dualpipev", "train_micro_batch_size_per_gpu": 1}
DECAY = {
    "optimizer": {"type": "SGD", "no_wd_kws": ["norm"], "params": {"lr": 0.1, "weight_decay": 0.02}},
}
ROUTER = {"aux_router_loss": {"weight": 0.5}}


class Case(NamedTuple):
    """
    Attributes:
        dims: stages and replicas.
        tolerance: of a weight; 0 to the last bit.
        by_products: whether products add to fp32 sums themselves, as on a GPU.
    """

    model: str
    dims: tuple[int, int]
    keys: dict[str, Any]
    tolerance: float = 0
    by_products: bool = False


CASES = {
    "fp32": Case("untied", (1, 2), {}),
    "two-groups": Case("tied", (1, 2), DECAY),
    "round-robin": Case("tied", (1, 2), {"zero_optimization": {"round_robin_gradients": True}}),
    "bf16": Case("untied", (1, 2), BF16),
    "bf16-sent-in-fp32": Case("tied", (1, 2), BF16 | {"communication_data_type": "fp32"}),
    "fp16": Case("untied", (1, 2), FP16),
    "tied-ends": Case("tied", (2, 2), {}),
    "tied-ends-bf16": Case("tied", (2, 2), BF16),
    "dualpipev": Case("tied", (2, 2), DUALPIPEV),
    "dualpipev-recomputed": Case("untied", (2, 2), BF16 | DUALPIPEV | {"use_grad_ckpt": True}),
    "dualpipev-by-products": Case("tied", (2, 2), BF16 | DUALPIPEV, by_products=True),
    "experts": Case("mixtral", (2, 2), ROUTER),
    "four": Case("untied", (1, 4), {}, 1e-6),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
IN_EVERY_RUN = ("bf16", "fp16", "tied-ends-bf16", "dualpipev")
UNDER_TEST = [pytest.param(name, id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.longest) for name in CASES]


class Outcome(NamedTuple):
    norms: list[float]
    sent: list[tuple[int, int, bool]]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks,
    make_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    asked: set[str],
) -> dict[tuple[str, bool], list[Outcome]]:
    """Of every case that this session asks for, and whether DeepSpeed sums: each rank's outcome."""
    folder = tmp_path_factory.mktemp("replica_sums")
    (folder / "samples.json").write_text(json.dumps(samples()[:14]))
    chosen = {name: case for name, case in CASES.items() if name in asked}
    for processes in sorted({math.prod(case.dims) for case in chosen.values()}):
        described = [
            {
                "name": f"{name}-{by_deepspeed}",
                "config": config(case, by_deepspeed, folder, make_checkpoint),
                "by_products": case.by_products,
            }
            for name, case in chosen.items()
            for by_deepspeed in (False, True)
            if math.prod(case.dims) == processes
        ]
        ranks.run(processes, "replica_sums", described, folder)
    return {
        (name, by_deepspeed): [
            Outcome(
                **json.loads((folder / f"{name}-{by_deepspeed}.rank{rank}.json").read_text()),
                weights=load_file(folder / f"{name}-{by_deepspeed}.rank{rank}.safetensors"),
            )
            for rank in range(math.prod(case.dims))
        ]
        for name, case in chosen.items()
        for by_deepspeed in (False, True)
    }


def config(case: Case, by_deepspeed: bool, folder: Path, make_checkpoint: Callable[..., Path]) -> dict[str, Any]:
    model_type, changes = MODELS[case.model]
    parts = {1: [5], 2: [1, 2, 1, 1] if "schedule" in case.keys else [3, 2]}[case.dims[0]]
    keys: dict[str, Any] = {
        "model_path": str(make_checkpoint(model_type, **changes)),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "n_epoches": 1,
        "model_topo": topology(case.dims, parts),
    } | case.keys
    zero = {"stage": 1} | keys.get("zero_optimization", {}) | ({"reduce_scatter": True} if by_deepspeed else {})
    return keys | {"zero_optimization": zero}


@pytest.mark.parametrize("name", UNDER_TEST)
def test_the_steps_are_those_of_deepspeed(name: str, outcomes: dict[tuple[str, bool], list[Outcome]]) -> None:
    for found, expected in zip(outcomes[name, False], outcomes[name, True], strict=True):
        assert not expected.sent
        torch.testing.assert_close(found.norms, expected.norms, atol=0, rtol=1e-6)
        torch.testing.assert_close(found.weights, expected.weights, atol=CASES[name].tolerance, rtol=0)


@pytest.mark.parametrize("name", UNDER_TEST)
def test_replicas_sum_in_one_order_while_they_compute(
    name: str, outcomes: dict[tuple[str, bool], list[Outcome]]
) -> None:
    replicas = CASES[name].dims[1]
    stages = [
        outcomes[name, False][first : first + replicas] for first in range(0, math.prod(CASES[name].dims), replicas)
    ]
    for stage in stages:
        sent, weights = stage[0].sent, stage[0].weights
        assert all(replica.sent == sent for replica in stage)
        assert sum(numbers for _, numbers, _ in sent) == sum(weight.numel() for weight in weights.values())
        late = sum(numbers for _, numbers, computing in sent if not computing)
        # The ends of a tied weight are added up over two stages before.
        tied_ends = CASES[name].model == "tied" and CASES[name].dims[0] > 1 and "schedule" not in CASES[name].keys
        assert late == (max(weight.numel() for weight in weights.values()) if tied_ends else 0)

"""Training steps are those of one process, and those of DeepSpeed's own sums and clipping.

Clipping is by the norm over all stages, wherever DeepSpeed clips: fp32 and bf16, with and without ZeRO. SGD alone takes
the gradient's length into its step: AdamW and Lion walk nearly as far with a gradient that was scaled wrongly. The
model is tied, so a norm that counted both copies of the weight would be too large. Stages may have different numbers of
parameter groups, and `no_wd_kws` may match one name of the tied weight only.

Sums that are not set to zero, clipping as a part of the update, and replicas that sum while they compute move less than
DeepSpeed and give its numbers: to the last bit, but for clipping, which divides where DeepSpeed multiplies by the
inverse, and for more than two replicas. An epoch's last batch is smaller, so no two steps need have as many
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.cases import tiered
from tests.closeness import assert_near
from tests.launching import OFFLOAD, topology
from tests.ranks import Ranks, write_samples
from training.engine.gradients import clip

NORM = 0.5
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0e-4, "weight_decay": 0.1}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.5}}}
SGD_DECAY = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.02}}
TWO_GROUPS = {"optimizer": SGD_DECAY | {"no_wd_kws": ["norm"]}}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
WITHOUT_ZERO = {"zero_optimization": {"stage": 0}}
DUALPIPEV = {"schedule": "dualpipev", "train_micro_batch_size_per_gpu": 1}
CLIPPED = ADAMW | {"gradient_clipping": NORM}
UNROUNDED = BF16 | {"communication_data_type": "fp32"}  # DeepSpeed would round sums that go nowhere
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


class Case(NamedTuple):
    """
    Attributes:
        dims: stages and replicas.
        tolerance: of losses, weights and AdamW's averages; 0 to the last bit.
        by_products: whether products add to fp32 sums themselves, as on a GPU.
        deepspeed: whether all is done as DeepSpeed does it.
    """

    dims: tuple[int, int]
    keys: dict[str, Any] = {}
    model: str = "tied"
    tolerance: float = 0.0
    by_products: bool = False
    deepspeed: bool = False


# Clipped otherwise, a gradient is rounded otherwise, and AdamW divides by its size: seen were 1.2e-6 of steps of 1e-3.
ROUNDED = 5e-6

VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "sgd_without_zero": SGD | WITHOUT_ZERO,
    "sgd_bf16": SGD | BF16,
    "sgd_bf16_without_zero": SGD | BF16 | WITHOUT_ZERO,
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1.0e-3}}},
    "uneven_groups": TWO_GROUPS,
    "uneven_groups_bf16": TWO_GROUPS | BF16,
    "uneven_groups_offload": TWO_GROUPS | OFFLOAD,
    "one_end_exempt": {"optimizer": SGD_DECAY | {"no_wd_kws": ["embed"]}},
    "adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 1.0e-2}}} | WITHOUT_ZERO,
}
# No norm on the first of two stages.
PARTS = {(2, 1): [1, 4], (2, 2): [2, 3]}
SPREAD = {
    f"{variant}-{dims[0]}x{dims[1]}": Case(
        dims, VARIANTS[variant] | {"gradient_clipping": NORM, "model_topo": topology(dims, PARTS[dims])}
    )
    for dims, variants in (((2, 1), VARIANTS), ((2, 2), ("sgd", "sgd_without_zero")))
    for variant in variants
}
STEPS = {  # the optimizer's, without replicas that sum
    "step-bf16": Case((2, 1), UNROUNDED | CLIPPED, tolerance=ROUNDED),
    "step-bf16-unclipped": Case((2, 1), UNROUNDED | ADAMW | {"gradient_clipping": 0}),
    "step-bf16-replicas": Case((1, 2), UNROUNDED | CLIPPED, tolerance=ROUNDED),
    "step-bf16-dualpipev": Case((2, 1), UNROUNDED | CLIPPED | DUALPIPEV, tolerance=ROUNDED),
    "step-fp16": Case((2, 1), FP16 | CLIPPED, tolerance=ROUNDED),
    "step-fp32": Case((2, 1), CLIPPED, tolerance=ROUNDED),
    "step-fp32-unsharded": Case((2, 1), CLIPPED | WITHOUT_ZERO, tolerance=ROUNDED),
}
IN_BUCKETS = ("step-fp16", "step-fp32")  # DeepSpeed's optimizer copies gradients into a bucket and out of it
SUMS = {
    "sums-fp32": Case((1, 2), model="untied"),
    "sums-two-groups": Case((1, 2), TWO_GROUPS),
    "sums-round-robin": Case((1, 2), {"zero_optimization": {"round_robin_gradients": True}}),
    "sums-bf16": Case((1, 2), BF16, "untied"),
    "sums-bf16-sent-in-fp32": Case((1, 2), UNROUNDED),
    "sums-fp16": Case((1, 2), FP16, "untied"),
    "sums-tied-ends": Case((2, 2)),
    "sums-tied-ends-bf16": Case((2, 2), BF16),
    "sums-dualpipev": Case((2, 2), DUALPIPEV),
    "sums-dualpipev-recomputed": Case((2, 2), BF16 | DUALPIPEV | {"use_grad_ckpt": True}, "untied"),
    "sums-dualpipev-by-products": Case((2, 2), BF16 | DUALPIPEV, by_products=True),
    "sums-experts": Case((2, 2), {"aux_router_loss": {"weight": 0.5}}, "mixtral"),
    "sums-four": Case((1, 4), model="untied", tolerance=ROUNDED),
}
SUMS = {name: case._replace(keys={"n_epoches": 1} | case.keys) for name, case in SUMS.items()}
# ZeRO-1 with CPU offload, which holds less on the device than DeepSpeed's; with and without sums in host memory.
KEPT: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "fp32": ((2, 1), {}),
    "bf16": ((2, 1), BF16),
    "fp16": ((2, 1), FP16),
    "bf16-replicas": ((2, 2), BF16),  # a weight lies in the parts of two replicas
    "fp16-replicas": ((1, 2), FP16),
    "bf16-dualpipev": ((2, 1), BF16 | DUALPIPEV),
    "two-groups-dualpipev": ((2, 1), TWO_GROUPS | DUALPIPEV),
    "bf16-lora": ((2, 1), BF16 | {"lora": {"r": 2}}),
    "bf16-frozen": ((2, 1), BF16 | {"freeze": ["embed_tokens", "lm_head", "layers\\.[01]\\."]}),
}
OFFLOADED = {
    f"offload-{name}": Case(dims, CLIPPED | OFFLOAD | keys, tolerance=ROUNDED) for name, (dims, keys) in KEPT.items()
}
HOST_SUMS = {
    name.replace("offload", "host"): case._replace(keys=case.keys | {"offload_gradients": True}, tolerance=0)
    for name, case in OFFLOADED.items()
}


def reference(name: str) -> tuple[str, Case]:
    """Name and describe the run that a case is compared with."""
    if name in SPREAD:  # one process
        case = SPREAD[name]
        return f"{name.rpartition('-')[0]}-1x1", Case((1, 1), case.keys | {"model_topo": topology((1, 1), [5])})
    if name in HOST_SUMS:
        plain = name.replace("host", "offload")
        return plain, OFFLOADED[plain]
    if name in STEPS | OFFLOADED:
        return f"{name}-by-deepspeed", (STEPS | OFFLOADED)[name]._replace(deepspeed=True)
    case = SUMS[name]  # to name DeepSpeed's default leaves the sums to it
    zero = case.keys.get("zero_optimization", {}) | {"reduce_scatter": True}
    return f"{name}-by-deepspeed", case._replace(keys=case.keys | {"zero_optimization": zero})


def config(case: Case, model: Path, samples: Path) -> dict[str, Any]:
    stages = case.dims[0] * (2 if "schedule" in case.keys else 1)
    return {
        "model_path": str(model),
        "data_path": str(samples),
        "save_path": str(samples.parent),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2 // case.dims[1] or 1,
        "n_epoches": 2,
        "model_topo": topology(case.dims, {1: [5], 2: [3, 2], 4: [1, 2, 1, 1]}[stages]),
    } | case.keys


Outcomes = dict[str, list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, asked: set[str]
) -> Outcomes:
    """What each rank saved, of all cases that this session asks for and of their references."""
    folder = tmp_path_factory.mktemp("steps")
    write_samples(folder, 14)
    chosen = {name: case for name, case in (SPREAD | STEPS | SUMS | OFFLOADED | HOST_SUMS).items() if name in asked}
    chosen |= dict(map(reference, list(chosen)))
    models = {
        name: make_checkpoint(MODELS[name][0], **MODELS[name][1]) for name in {case.model for case in chosen.values()}
    }
    described = [
        {
            "name": name,
            "deepspeed": case.deepspeed,
            "by_products": case.by_products,
            "config": config(case, models[case.model], folder / "samples.json"),
        }
        for name, case in chosen.items()
    ]
    ranks.run_all("steps", described, folder)
    return {
        name: [load_file(folder / f"{name}.{rank}.safetensors") for rank in range(math.prod(case.dims))]
        for name, case in chosen.items()
    }


FEW_SPREAD = ("sgd_bf16_without_zero-2x1", "uneven_groups-2x1", "adafactor-2x1")


@pytest.mark.launched
@pytest.mark.parametrize("name", tiered(SPREAD, ["sgd-2x1"], FEW_SPREAD))
def test_clipped_steps_are_those_of_one_process(name: str, outcomes: Outcomes) -> None:
    expected, found = outcomes[reference(name)[0]][0], outcomes[name][0]
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    assert expected["norms"].min() > 2 * NORM, "little was clipped"
    assert_near(found["losses"], expected["losses"], dtype, "means")
    assert_near(found["norms"], expected["norms"], dtype, "norms")


FEW = ("step-bf16", "step-fp32-unsharded", "sums-bf16", "sums-fp16", "sums-tied-ends-bf16", "sums-dualpipev")


@pytest.mark.launched
@pytest.mark.parametrize("name", tiered(STEPS | SUMS, (), FEW))
def test_steps_are_those_of_deepspeed(name: str, outcomes: Outcomes) -> None:
    case = (STEPS | SUMS)[name]
    for found, expected in zip(outcomes[name], outcomes[reference(name)[0]], strict=True):
        torch.testing.assert_close(found["norms"], expected["norms"], atol=0, rtol=1e-6)
        assert found.keys() == expected.keys()
        compared = {each for each in found if each.startswith(("weight.", "average.", "losses"))}
        if name in SUMS:  # a norm that is added up in another order changes clipped gradients in the last bit
            compared = {each for each in compared if not each.startswith("average.")}
        for each in compared:
            torch.testing.assert_close(found[each], expected[each], atol=case.tolerance, rtol=case.tolerance)
        if name in SUMS:
            assert not len(expected["sent"]), "DeepSpeed has no reduces"
        elif case.dims[1] == 1 and name not in IN_BUCKETS:  # nothing to sum: no buffer is copied, not even onto itself
            assert found["reduction"] == 0 < expected["reduction"]
        if "gradient_clipping" in case.keys:
            assert expected["norms"].min() > 2 * NORM, "little was clipped"


@pytest.mark.launched
@pytest.mark.parametrize("name", tiered(SUMS, (), [name for name in FEW if name in SUMS]))
def test_replicas_sum_in_one_order_while_they_compute(name: str, outcomes: Outcomes) -> None:
    case, replicas = SUMS[name], SUMS[name].dims[1]
    for first in range(0, math.prod(case.dims), replicas):
        stage = outcomes[name][first : first + replicas]
        sent = stage[0]["sent"].tolist()
        assert all(replica["sent"].tolist() == sent for replica in stage)
        sizes = [weight.numel() for each, weight in stage[0].items() if each.startswith("weight.")]
        assert sum(numbers for _, numbers, _ in sent) == sum(sizes)
        late = sum(numbers for _, numbers, computing in sent if not computing)
        # The ends of a tied weight are added up over two stages before.
        tied_ends = case.model == "tied" and case.dims[0] > 1 and "schedule" not in case.keys
        assert late == (max(sizes) if tied_ends else 0)


FEW_OFFLOADED = ("offload-bf16", "host-bf16", "host-fp32", "host-bf16-dualpipev")


@pytest.mark.launched
@pytest.mark.parametrize("name", tiered(OFFLOADED | HOST_SUMS, (), FEW_OFFLOADED))
def test_sums_for_an_optimizer_on_the_cpu_change_no_bit(name: str, outcomes: Outcomes) -> None:
    tolerance = (OFFLOADED | HOST_SUMS)[name].tolerance  # where DeepSpeed clips
    for found, expected in zip(outcomes[name], outcomes[reference(name)[0]], strict=True):
        assert found.keys() == expected.keys()
        for each in found.keys() - {"reduction", "sent"}:
            torch.testing.assert_close(found[each], expected[each], atol=tolerance, rtol=tolerance)


def test_fused_optimizers_divide_and_others_get_multiplied_gradients() -> None:
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

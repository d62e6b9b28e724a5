"""Gradients are added to fp32 sums bit for bit as after a conversion, and without one; products add more exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from models.weight_gradients import WeightGradients
from tests.closeness import assert_near
from tests.models.helpers import spec_of
from training.engine.embedding_gradients import add_rows_alone
from training.engine.gradients import SLICE, add, sum_without_copies

SIZES = [(3,), (SLICE,), (5, SLICE // 2 + 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("of", [lambda tensor: tensor, lambda tensor: tensor.t()], ids=["straight", "transposed"])
def test_sums_are_those_of_converted_gradients(
    of: Callable[[Tensor], Tensor], size: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    total, gradient = torch.randn(size), of(torch.randn(size[::-1] if of(torch.empty(2, 3)).shape[0] == 3 else size))
    gradient = gradient.to(dtype)
    expected = total + gradient.float()
    add(total, gradient)
    torch.testing.assert_close(total, expected, rtol=0, atol=0)


def allocated(work: Callable[[], object]) -> int:
    """The most bytes that an operation took for itself."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    return max((event.cpu_memory_usage for event in found.events() or []), default=0)


def test_no_copy_of_a_gradient_is_made() -> None:
    total, gradient = torch.zeros(8 * SLICE), torch.ones(8 * SLICE, dtype=torch.bfloat16)
    assert allocated(lambda: total.add_(gradient.float())) == 4 * total.numel()
    assert allocated(lambda: add(total, gradient)) <= 4 * SLICE


def test_an_optimizer_of_zero_adds_up_so() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    parameter.grad_accum = None  # type: ignore[attr-defined]
    optimizer = SimpleNamespace(gradient_accumulation_dtype=torch.float32, _fill_param_grad_accum_attribute=None)
    sum_without_copies(optimizer)
    for value in (1.0, 2.0**-10, 2.0**-10):
        parameter.grad = torch.full((4,), value, dtype=torch.bfloat16)
        optimizer._fill_param_grad_accum_attribute(parameter)
        assert parameter.grad is None
    torch.testing.assert_close(parameter.grad_accum, torch.full((4,), 1 + 2.0**-9), rtol=0, atol=0)  # type: ignore[attr-defined]
    other = SimpleNamespace()
    sum_without_copies(other)
    assert vars(other) == {}


def bf16_optimizer(weights: list[nn.Parameter]) -> Any:
    """DeepSpeed's, with what it holds of gradients alone: sums that a step before left, and hooks."""
    optimizer: Any = object.__new__(BF16_Optimizer)
    optimizer.bf16_groups = [weights]
    flat = torch.full((sum(weight.numel() for weight in weights),), float("nan"))
    optimizer.fp32_groups_gradients = [list(flat.split([weight.numel() for weight in weights]))]
    optimizer.fp32_groups_gradients_flat = optimizer.non_expert_gradients = [flat]
    optimizer.fp32_groups_has_gradients = [[False] * len(weights)]
    optimizer.has_moe_layers, optimizer.immediate_grad_update, optimizer.autoep_folding_tp_group = False, True, None
    optimizer.grad_acc_dtype, optimizer._grad_acc_hooks = torch.float32, []
    optimizer.create_grad_acc_hooks()
    sum_without_copies(optimizer)
    return optimizer


def test_sums_begin_anew_in_each_step_and_what_gets_no_gradient_is_zero() -> None:
    weights = [nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = bf16_optimizer(weights)
    for used in ((0, 1), (0,)):
        for value in (1.0, 2.0**-10):
            torch.stack([value * weights[number] for number in used]).sum().backward()
        (sums,), _ = optimizer.get_grads_for_reduction()
        expected = torch.tensor([(1 + 2.0**-10) * (number in used) for number in range(2)]).repeat_interleave(6)
        torch.testing.assert_close(sums, expected, rtol=0, atol=0)
        optimizer.zero_grad()


def without_rounding(total: Tensor, left: Tensor, right: Tensor, *, beta: float, out: Tensor, **_: Any) -> Tensor:
    """What a GPU's product of 16-bit matrices adds to an fp32 one; a CPU has none."""
    product = left.float() @ right.float()
    return out.copy_(total + product if beta else product)


def test_a_product_adds_to_the_sum_and_is_nearer_to_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    passes = [[torch.randn(2, 40, 16).bfloat16() for _ in range(6)] for _ in range(2)]
    sums: dict[bool, list[Tensor]] = {}
    for of_a_gpu in (False, True):
        if of_a_gpu:
            for module in ("models.loss.lean", "training.engine.gradients"):
                monkeypatch.setattr(f"{module}.gives_fp32", lambda _: True)
            monkeypatch.setattr(torch, "addmm", without_rounding)
        torch.manual_seed(0)
        linear = nn.Linear(16, 8, dtype=torch.bfloat16)
        optimizer, later = bf16_optimizer(list(linear.parameters())), WeightGradients()
        later.defer(linear)
        sums[of_a_gpu] = []
        for micro_batches in passes:
            for inputs in micro_batches:
                linear(inputs.requires_grad_()).sum().backward()
                later.close()
                later.compute()
            sums[of_a_gpu].append(optimizer.get_grads_for_reduction()[0][0].clone())
            assert linear.weight.grad is None
            optimizer.zero_grad()
    for step, micro_batches in enumerate(passes):
        inputs = torch.cat([each.flatten(0, 1) for each in micro_batches]).double()
        exact = torch.cat([inputs.sum(0).repeat(8), inputs.new_full((8,), len(inputs))])
        rounded, found = (sums[of_a_gpu][step] for of_a_gpu in (False, True))
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-5)
        assert_near(found, rounded, torch.bfloat16)
        assert (found - exact).abs().sum() < (rounded - exact).abs().sum() / 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("own_sum", [False, True], ids=["grad", "sum"])
def test_an_embedding_adds_its_rows_alone(
    dtype: torch.dtype, padding: int | None, own_sum: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    spec = spec_of()
    first = spec.build(0, spec.positions())
    plain, ours = (nn.Embedding(5000, 64, padding).to(dtype) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    first.embed_tokens = ours
    add_rows_alone(nn.Sequential(first, plain))
    assert "forward" in vars(ours) and "forward" not in vars(plain)
    total = torch.zeros(ours.weight.shape)
    if own_sum:  # of an optimizer that keeps fp32 sums
        ours.weight.begun_sum = lambda: total  # type: ignore[attr-defined]
    seen: list[int] = []
    ours.weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(seen)))
    expected = torch.zeros(plain.weight.shape)
    for number in range(3):
        ids = torch.randint(0, 12 + 4000 * (number == 1), (2, 50))  # many twice
        weigh = torch.randn(2, 50, 64).to(dtype)
        for layer in (plain, ours):
            loss = (layer(ids) * weigh).sum()
            taken = allocated(loss.backward)
        expected += torch.autograd.grad((plain(ids) * weigh).sum(), plain.weight)[0]
    assert taken < plain.weight.nbytes
    assert len(seen) == 3
    if own_sum:
        torch.testing.assert_close(total, expected, rtol=0, atol=0)
    else:
        torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=0, atol=0)

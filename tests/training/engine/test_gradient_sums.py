"""Gradients are added to fp32 sums bit for bit as after a conversion, and without one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from training.engine.gradient_sums import SLICE, add, sum_as_they_are

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
    sum_as_they_are(optimizer)
    for value in (1.0, 2.0**-10, 2.0**-10):
        parameter.grad = torch.full((4,), value, dtype=torch.bfloat16)
        optimizer._fill_param_grad_accum_attribute(parameter)
        assert parameter.grad is None
    torch.testing.assert_close(parameter.grad_accum, torch.full((4,), 1 + 2.0**-9), rtol=0, atol=0)  # type: ignore[attr-defined]
    other = SimpleNamespace()
    sum_as_they_are(other)
    assert vars(other) == {}

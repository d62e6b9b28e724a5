"""16-bit gradients are added to their fp32 sums without an fp32 copy of each in between.

DeepSpeed 0.19.8 converts a gradient as a whole and adds what it got: of each parameter 18 bytes are moved in every
micro-batch, and as many more lie in memory for a moment as its largest gradient has in fp32. Added as it is, a gradient
moves 10 bytes: itself and the sum, which is read and written. The sums are the same to the last bit.

A GPU's kernel converts what it reads. A CPU's makes a copy, so there a gradient is added in slices whose copies stay in
the cache; it takes a third of the time (`python -m benchmarks.throughput --only gradient_sum`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

SLICE = 2**16  # numbers


def add(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a sum of the same shape and another dtype."""
    if total.is_cpu and total.is_contiguous() and gradient.is_contiguous():
        for part, added in zip(total.view(-1).split(SLICE), gradient.view(-1).split(SLICE), strict=True):
            part.add_(added)
    else:
        total.add_(gradient)


def sum_as_they_are(optimizer: Any) -> None:
    """Let DeepSpeed's ZeRO optimizer (stages 1 and 2) add gradients up so; any other one is left as it is."""

    def fill(parameter: Any) -> None:
        if parameter.grad is None:
            return
        if parameter.grad_accum is None:
            parameter.grad_accum = parameter.grad.to(optimizer.gradient_accumulation_dtype)
        else:
            add(parameter.grad_accum, parameter.grad.view(parameter.grad_accum.shape))
        parameter.grad = None

    if hasattr(optimizer, "_fill_param_grad_accum_attribute"):
        optimizer._fill_param_grad_accum_attribute = fill

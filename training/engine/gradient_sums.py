"""16-bit gradients are added to their fp32 sums without an fp32 copy of each in between, or by the product itself.

DeepSpeed 0.19.8 converts a gradient as a whole and adds what it got: of each parameter 18 bytes are moved in every
micro-batch, and as many more lie in memory for a moment as its largest gradient has in fp32. Added as it is, a gradient
moves 10 bytes: itself and the sum, which is read and written; 6 in a step's first micro-batch, which overwrites what
the step before left, where DeepSpeed sets the sums to zero twice. The sums are the same to the last bit.

Where the gradients of linear layers' weights are computed later (`models.weight_gradients`), the product itself
adds to the sum: nothing is rounded to 16 bits, which is nearer to the true sum, and what is moved hides behind the
arithmetic. Only GPUs have such a product.

A GPU's kernel converts what it reads. A CPU's makes a copy, so there a gradient is added in slices whose copies stay in
the cache; it takes a third of the time (`python -m benchmarks.throughput --only gradient_sum`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from models.lean_loss import add_product, gives_fp32

SLICE = 2**16  # numbers


def add(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a sum of the same shape and another dtype."""
    if total.is_cpu and total.is_contiguous() and gradient.is_contiguous():
        for part, added in zip(total.view(-1).split(SLICE), gradient.view(-1).split(SLICE), strict=True):
            part.add_(added)
    else:
        total.add_(gradient)


def sum_as_they_are(optimizer: Any) -> None:
    """Let DeepSpeed's optimizers add gradients up so: the one for bf16, and ZeRO's with the optimizer on the CPU.

    Any other one is left as it is.
    """

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
    if isinstance(optimizer, BF16_Optimizer):
        _Sums(optimizer)


class _Sums:
    """What DeepSpeed's bf16 optimizer holds of gradients, which is one tensor for each group of parameters."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._reduced = optimizer.get_grads_for_reduction
        optimizer._update_hp_grad = self._fill
        optimizer.get_grads_for_reduction = self._complete
        optimizer.clear_hp_grads = self._forget
        for group, parameters in enumerate(optimizer.bf16_groups):
            for number, parameter in enumerate(parameters):
                if optimizer.grad_acc_dtype == torch.float32 and gives_fp32(parameter.device):
                    parameter.add_product = partial(self._add_product, parameter, group, number)

    def _fill(self, parameter: Any, group: int, number: int, clear_lp_grads: bool = False) -> None:
        if parameter.grad is not None:
            total, begun = self._sum(parameter, group, number)
            if begun:
                add(total, parameter.grad)
            else:
                total.copy_(parameter.grad)

    @torch.no_grad()
    def _add_product(self, parameter: Any, group: int, number: int, left: Tensor, right: Tensor) -> None:
        total, begun = self._sum(parameter, group, number)
        add_product(total, left, right, beta=float(begun))
        for heard in (parameter._post_accumulate_grad_hooks or {}).values():  # as autograd would do
            heard(parameter)

    def _sum(self, parameter: Any, group: int, number: int) -> tuple[Tensor, bool]:
        """The sum of a parameter's gradient in its shape, and whether this step has begun it, as it does now."""
        begun = self._optimizer.fp32_groups_has_gradients[group]
        parameter._hp_grad = self._optimizer.fp32_groups_gradients[group][number]
        before, begun[number] = begun[number], True
        return parameter._hp_grad.view(parameter.shape), before

    def _complete(self) -> Any:
        """Before the sums are used: those that this step did not begin are zero."""
        for group, begun in enumerate(self._optimizer.fp32_groups_has_gradients):
            for number, total in enumerate(self._optimizer.fp32_groups_gradients[group]):
                if not begun[number]:
                    total.zero_()
        return self._reduced()

    def _forget(self) -> None:
        for begun in self._optimizer.fp32_groups_has_gradients:
            begun[:] = [False] * len(begun)

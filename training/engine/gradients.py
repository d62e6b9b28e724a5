"""Sum and clip gradients with less memory traffic than DeepSpeed.

Sums: DeepSpeed 0.19.8 converts each gradient to fp32 before adding it: 18 bytes moved per parameter and micro-batch,
and a temporary fp32 copy of the largest gradient. Adding it directly moves 10 bytes (read the gradient, read and write
the sum), and 6 in a step's first micro-batch, which overwrites the old sum instead of zeroing it. The sums are the same
to the last bit.

Where the weight gradients of linear layers are computed later (`models.weight_gradients`), the matrix product
adds to the sum: nothing is rounded to 16 bits, and the memory traffic hides behind the arithmetic. Only GPUs can.

A GPU kernel converts as it reads. A CPU kernel makes a copy, so there gradients are added in slices whose copies fit
the cache, in a third of the time.

Clipping: DeepSpeed and torch multiply each gradient by a factor, which moves 8 bytes per parameter, and the update
reads it again. torch's fused AdamW and Adam kernels can divide by `grad_scale` as they read, and write the result back:
4 bytes. A division rounds once, an inverse and a product twice, so an update may differ in the gradient's last bit. The
fp16 loss scale is divided out in the same pass. Other optimizers get multiplied gradients, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from models.loss.lean import add_product, gives_fp32

SLICE = 2**16  # numbers
ROUNDING = 1e-6  # DeepSpeed and torch add it to the norm


def add(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a sum of the same shape and another dtype."""
    if total.is_cpu and total.is_contiguous() and gradient.is_contiguous():
        for part, added in zip(total.view(-1).split(SLICE), gradient.view(-1).split(SLICE), strict=True):
            part.add_(added)
    else:
        total.add_(gradient)


def sum_without_copies(optimizer: Any) -> None:
    """Make DeepSpeed's bf16 optimizer, or ZeRO with CPU offload, sum gradients this way; leave others alone."""

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
    if getattr(optimizer, "cpu_offload", False) and not optimizer.partition_gradients:
        _hold_less_on_the_device(optimizer)
    if isinstance(optimizer, BF16_Optimizer):
        _Bf16Sums(optimizer)


def _hold_less_on_the_device(optimizer: Any) -> None:
    """Spare a GPU what ZeRO-1 with CPU offload holds there to no end in DeepSpeed 0.19.8.

    That is a second buffer of `reduce_bucket_size`, the first one through all micro-batches, and where 16-bit weights
    have fp32 sums a copy of all sums of the partition: in bf16 4 bytes a parameter at the end of the step.
    """
    set_up, reduce = optimizer.setup_buckets, optimizer.reduce_gradients

    def reduce_gradients(pipeline_parallel: bool = False) -> None:
        set_up()
        reduce(pipeline_parallel=False)  # else it makes the second one

    optimizer.setup_buckets, optimizer.reduce_gradients = lambda: None, reduce_gradients
    optimizer._use_compact_grad_partition_buffer = lambda group: False


class _Bf16Sums:
    """The fp32 gradient sums of DeepSpeed's bf16 optimizer, one tensor per parameter group."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._reduced = optimizer.get_grads_for_reduction
        optimizer._update_hp_grad = self._fill
        optimizer.get_grads_for_reduction = self._complete
        optimizer.clear_hp_grads = self._forget
        for group, parameters in enumerate(optimizer.bf16_groups):
            for number, parameter in enumerate(parameters):
                parameter.begun_sum = partial(self._begun, parameter, group, number)
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
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # autograd would call them
            hook(parameter)

    def _begun(self, parameter: Any, group: int, number: int) -> Tensor | None:
        """Return a parameter's gradient sum if this step has added to it."""
        begun = self._optimizer.fp32_groups_has_gradients[group][number]
        return self._sum(parameter, group, number)[0] if begun else None

    def _sum(self, parameter: Any, group: int, number: int) -> tuple[Tensor, bool]:
        """Return a parameter's gradient sum, and whether this step has added to it before; it has from now on."""
        begun = self._optimizer.fp32_groups_has_gradients[group]
        parameter._hp_grad = self._optimizer.fp32_groups_gradients[group][number]
        before, begun[number] = begun[number], True
        return parameter._hp_grad.view(parameter.shape), before

    def _complete(self) -> Any:
        """Zero the sums that got no gradient in this step, then reduce."""
        for group, begun in enumerate(self._optimizer.fp32_groups_has_gradients):
            for number, total in enumerate(self._optimizer.fp32_groups_gradients[group]):
                if not begun[number]:
                    total.zero_()
        return self._reduced()

    def _forget(self) -> None:
        for begun in self._optimizer.fp32_groups_has_gradients:
            begun[:] = [False] * len(begun)


def clip(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], most: float, norm: Tensor) -> None:
    """Clip the gradients of `weights` to the norm `most`, in the optimizer's next step if it is fused, else now."""
    if optimizer.defaults.get("fused"):
        _divide(optimizer, (norm + ROUNDING) / most)
    else:
        nn.utils.clip_grads_with_norm_(weights, most, norm)


def clip_in_update(optimizer: Any) -> None:
    """Make DeepSpeed's bf16 or ZeRO 1 and 2 optimizer clip in its update."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is None or not inner.defaults.get("fused"):
        return
    if isinstance(optimizer, BF16_Optimizer):
        gradients = optimizer.get_grads_for_norm

        def for_norm(for_clipping: bool = False) -> Any:
            if not for_clipping:
                return gradients()
            _divide(inner, (optimizer._global_grad_norm + ROUNDING) / optimizer.clip_grad)
            return []  # nothing left for DeepSpeed to multiply

        optimizer.get_grads_for_norm = for_norm
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):

        def unscale(_: Any, norm: Tensor) -> None:
            _divide(inner, (norm / optimizer.loss_scale + ROUNDING) / optimizer.clip_grad, optimizer.loss_scale)

        optimizer.unscale_and_clip_grads = unscale


def _divide(optimizer: torch.optim.Optimizer, excess: Tensor, scale: float = 1.0) -> None:
    """Make the next step divide gradients by `scale` and, if above 1, by `excess` (norm over its limit)."""
    divisor = excess.clamp(min=1.0) * scale
    # No extra synchronization: the host has waited for the norm already.
    optimizer.grad_scale = divisor if divisor != 1 else None  # type: ignore[attr-defined]

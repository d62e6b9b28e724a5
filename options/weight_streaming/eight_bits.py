"""Make the 8-bit copies of a turn's weights once, when they have arrived, and not in every micro-batch (`fp8`).

The copies are those that torchao makes, so the products are those of a pipeline in fp8. The weights arrive in bf16: to
send copies that the host makes would halve their bytes and gain less than 2 %, as they come beside the computing
(docs/performance.md#beside-llmq).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole

from options.weight_streaming.products import nothing_like, shaped_as


class EightBits:
    """The linear layers of some blocks, which multiply with copies of their weights."""

    def __init__(self) -> None:
        self._layers: dict[int, list[Any]] = {}

    def add(self, number: int, block: nn.Module, last: str | None, kept: Collection[str] = ()) -> None:
        """Let the linear layers of block `number` use copies.

        Args:
            last: the name of that whose product is left out where the block is computed again.
            kept: names of those whose products are kept until then.
        """
        for name, linear in block.named_modules():
            if isinstance(linear, Float8Linear):
                linear.__class__ = EndingCopiedLinear if name == last else CopiedLinear
                if name in kept:
                    linear.__class__ = KeptCopiedLinear
                self._layers.setdefault(number, []).append(linear)

    @torch.no_grad()
    def make(self, layers: Iterable[int]) -> None:
        """Copy the weights of these layers, which are on the device."""
        for linear in self._of(layers):
            linear.copied = hp_tensor_to_float8_dynamic(
                linear.weight,
                linear.config.cast_config_weight.target_dtype,
                linear.linear_mm_config,
                gemm_input_role=GemmInputRole.WEIGHT,
            )

    def drop(self, layers: Iterable[int]) -> None:
        """Free the copies of these layers."""
        for linear in self._of(layers):
            del linear.copied

    def _of(self, layers: Iterable[int]) -> list[Any]:
        found = []
        for number in layers:
            found += self._layers.get(number, [])
        return found


class CopiedLinear(Float8Linear):
    """A linear layer that multiplies with a copy of its weight."""

    copied: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self._with_bias(self._multiplied(matmul_with_hp_or_float8_args, input))

    def _multiplied(self, product: type[torch.autograd.Function], inputs: Tensor, *kept: Tensor) -> Tensor:
        weight = _Copied.apply(self.weight, self.copied)
        output: Tensor = product.apply(inputs, weight, self.linear_mm_config, self.config, *kept)
        return output

    def _with_bias(self, output: Tensor) -> Tensor:
        return output if self.bias is None else output + self.bias


class EndingCopiedLinear(CopiedLinear):
    """The one that a block ends in, whose product is left out where the block is computed again."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._with_bias(self._multiplied(_UnfinishedInFp8, input))
        return super().forward(input)


class KeptCopiedLinear(CopiedLinear):
    """One whose product, without the bias, is kept from a forward turn to a backward turn."""

    kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            assert self.kept is not None
            return self._with_bias(self._multiplied(_UnfinishedInFp8, input, shaped_as(self.kept, input)))
        self.kept = self._multiplied(matmul_with_hp_or_float8_args, input)
        return self._with_bias(self.kept)


class _Copied(torch.autograd.Function):
    """A copy in the place of its weight, which gets the gradient; both [in, out]."""

    @staticmethod
    def forward(context: Any, weight: Tensor, copied: Tensor) -> Tensor:
        return copied.t()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].t(), None


@torch.compiler.allow_in_graph
class _UnfinishedInFp8(matmul_with_hp_or_float8_args):
    """torchao's product, of which only the backward pass is computed."""

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, weight: Tensor, products: Any, config: Any, kept: Tensor | None = None
    ) -> Tensor:
        context.save_for_backward(inputs, weight)
        context.linear_mm_config, context.config = products, config
        return nothing_like(inputs, weight.t()) if kept is None else kept

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *matmul_with_hp_or_float8_args.backward(context, *gradients), None

"""A base of fewer bits under its adapters: 4, by bitsandbytes (QLoRA, arXiv:2305.14314), or the 8 that it is stored in.

4 bits: the weights of the blocks' linear layers and experts become NF4, 64 to a scale, and the scales themselves 8
bits: 4.127 bits a weight. Embedding, norms, routers and head stay in 16 bits. Each layer is quantized as soon as it is
loaded, so no process ever holds more than one layer in 16 bits. Products widen a weight to the dtype of the
computation, and so does the backward pass.

8 bits: the weights that a checkpoint stores in fp8 stay as they are, with the scales of their blocks; the numbers are
held as bytes, which nothing takes for numbers to cast.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.adapters import Adapted, AdaptedExperts, expert_weights, mixed

NF4, FP8 = "nf4", "fp8"
PACKAGE = "bitsandbytes"
BYTES: dict[str | None, float] = {
    NF4: 0.516,
    FP8: 1 + 4 / 128,
}  # of a weight; fp8 with a scale for 128 columns of a row


class Fp8(NamedTuple):
    """What numbers in 8 bits stand for."""

    scales: Tensor  # [..., rows, blocks]
    columns: int  # of a block
    dtype: torch.dtype  # that the products with the scales are rounded to

    def widen(self, numbers: Tensor) -> Tensor:
        """Multiply numbers [..., rows, columns] with their scales."""
        wide = (numbers.view(torch.float8_e4m3fn) if numbers.dtype == torch.uint8 else numbers).float()
        if wide.shape[-1] % self.columns:
            wide *= self.scales.repeat_interleave(self.columns, dim=-1)[..., : wide.shape[-1]]
        else:
            wide.unflatten(-1, (-1, self.columns)).mul_(self.scales[..., None])
        return wide.to(self.dtype)


class _Fp8Product(torch.autograd.Function):
    """A product with a weight in 8 bits, which is widened again for the backward pass."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, numbers: Tensor, state: Fp8) -> Tensor:
        context.weight = numbers, state
        return F.linear(inputs, state.widen(numbers).to(inputs.dtype))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        numbers, state = context.weight
        return gradients[0] @ state.widen(numbers).to(gradients[0].dtype), None, None


class QuantizedLinear(nn.Module):
    """A linear layer with a packed weight, and maybe an adapter; mixed into the class that it had."""

    bias: nn.Parameter | None

    def forward(self, inputs: Tensor) -> Tensor:
        output = product(self, inputs)
        if self.bias is not None:
            output = output + self.bias
        return output + self.low_rank(inputs) if isinstance(self, Adapted) else output


def product(module: Any, inputs: Tensor) -> Tensor:
    """Multiply with the weight of a linear layer, packed or not, without its bias."""
    if "packed" not in vars(module):
        return F.linear(inputs, module.weight)
    if isinstance(module.packed["weight"], Fp8):
        wide: Tensor = _Fp8Product.apply(inputs, module.weight, module.packed["weight"])
        return wide
    from bitsandbytes import matmul_4bit  # takes a second, and only this kind of run has it

    output: Tensor = matmul_4bit(inputs, module.weight.t(), quant_state=module.packed["weight"])
    return output


def quantizable(block: nn.Module) -> dict[str, tuple[Any, str]]:
    """Find a block's weights that become 4 or 8 bits, with the modules that own them and their names there."""
    found: dict[str, tuple[Any, str]] = {}
    for path, module in block.named_modules():
        for name in ["weight"] if isinstance(module, nn.Linear) else expert_weights(module):
            weight = module._parameters.get(name)
            if weight is not None and not weight.requires_grad:
                found[f"{path}.{name}"] = (module, name)
    return found


@torch.no_grad()
def quantize(block: nn.Module, stored: dict[str, tuple[Tensor, Fp8]] | None = None) -> None:
    """Pack the weights of a loaded block in place.

    Args:
        stored: by name, those in fp8, all others stay as they are; without it weights become 4 bits.
    """
    for path, (module, name) in quantizable(block).items():
        weight = module._parameters[name]
        if stored is None:
            packed, state = _pack(weight)
        elif path in stored:
            numbers, state = stored[path]
            packed = numbers.to(weight.device, copy=True)
            state = state._replace(scales=state.scales.to(weight.device, copy=True))
        else:
            continue
        module._parameters[name] = nn.Parameter(packed, requires_grad=False)
        if isinstance(module, nn.Linear):
            vars(module)["packed"] = {name: state}
            module.__class__ = mixed(QuantizedLinear, module.__class__)
            continue
        widen = partial(_widen_fp8, state, weight.dtype) if stored else partial(_widen, state, weight.shape)
        vars(module).setdefault("packed", {})[name] = widen
        if not isinstance(module, AdaptedExperts):
            module.__class__ = mixed(AdaptedExperts, module.__class__)


@torch.no_grad()
def round_to_nf4(block: nn.Module) -> None:
    """Give the weights of a block that become 4 bits the values that they have there."""
    for module, name in quantizable(block).values():
        weight = module._parameters[name]
        packed, state = _pack(weight)
        weight.copy_(_widen(state, weight.shape, packed))


def _pack(weight: Tensor) -> tuple[Tensor, Any]:
    from bitsandbytes.functional import quantize_4bit

    flat = weight.reshape(-1, weight.shape[-1])
    packed: tuple[Tensor, Any] = quantize_4bit(flat, quant_type=NF4, compress_statistics=True)
    return packed


def _widen(state: Any, shape: torch.Size, packed: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    wide: Tensor = dequantize_4bit(packed, state)
    return wide.view(shape)


def _widen_fp8(state: Fp8, dtype: torch.dtype, packed: Tensor) -> Tensor:
    return state.widen(packed).to(dtype)

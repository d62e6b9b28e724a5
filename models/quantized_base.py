"""A base in 4 bits under its adapters (QLoRA, arXiv:2305.14314), by bitsandbytes.

The weights of the blocks' linear layers and experts become NF4, 64 to a scale, and the scales themselves 8 bits: 4.127
bits a weight. Embedding, norms, routers and head stay in 16 bits. Each layer is quantized as soon as it is loaded, so
no process ever holds more than one layer in 16 bits. Products widen a weight to the dtype of the computation, and so
does the backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.adapters import Adapted, AdaptedExperts, expert_weights, mixed

NF4 = "nf4"
PACKAGE = "bitsandbytes"
BYTES = 0.516  # of a weight


class Quantized(nn.Module):
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
    from bitsandbytes import matmul_4bit  # takes a second, and only this kind of run has it

    output: Tensor = matmul_4bit(inputs, module.weight.t(), quant_state=module.packed["weight"])
    return output


def quantizable(block: nn.Module) -> dict[str, tuple[Any, str]]:
    """Find a block's weights that become 4 bits, with the modules that own them and their names there."""
    found: dict[str, tuple[Any, str]] = {}
    for path, module in block.named_modules():
        for name in ["weight"] if isinstance(module, nn.Linear) else expert_weights(module):
            weight = module._parameters.get(name)
            if weight is not None and not weight.requires_grad:
                found[f"{path}.{name}"] = (module, name)
    return found


@torch.no_grad()
def quantize(block: nn.Module) -> None:
    """Pack the weights of a loaded block in place."""
    for module, name in quantizable(block).values():
        weight = module._parameters[name]
        packed, state = _pack(weight)
        module._parameters[name] = nn.Parameter(packed, requires_grad=False)
        if isinstance(module, nn.Linear):
            vars(module)["packed"] = {name: state}
            module.__class__ = mixed(Quantized, module.__class__)
            continue
        vars(module).setdefault("packed", {})[name] = partial(_widen, state, weight.shape)
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

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
    """A linear layer with a packed weight; mixed into the class that it had, below its adapter."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    packed: dict[str, Any]

    def forward(self, inputs: Tensor) -> Tensor:
        output = product(self, inputs)
        return output if self.bias is None else output + self.bias


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
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def widen(state: Any, shape: torch.Size, packed: Tensor) -> Tensor:
        wide: Tensor = dequantize_4bit(packed, state)
        return wide.view(shape)

    for module, name in quantizable(block).values():
        weight = module._parameters[name]
        packed, state = quantize_4bit(weight.reshape(-1, weight.shape[-1]), quant_type=NF4, compress_statistics=True)
        module._parameters[name] = nn.Parameter(packed, requires_grad=False)
        if isinstance(module, nn.Linear):
            vars(module)["packed"] = {name: state}
            kind: Any = module.__class__
            below = kind.__mro__[2] if isinstance(module, Adapted) else kind
            packs = mixed(Quantized, below)
            module.__class__ = mixed(Adapted, packs) if isinstance(module, Adapted) else packs
            continue
        vars(module).setdefault("packed", {})[name] = partial(widen, state, weight.shape)
        if not isinstance(module, AdaptedExperts):
            module.__class__ = mixed(AdaptedExperts, module.__class__)

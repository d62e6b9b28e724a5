"""Products of the blocks' linear layers in fp8, by torchao: on GPUs that have them at twice the rate of bf16.

The forward product and both products of the backward pass round their factors, each tensor scaled by its largest value:
weights and inputs to e4m3, with 3 bits after the leading one, gradients of outputs to e5m2, with 2 bits and the range
of fp16. Sums are in fp32, results in bf16. Parameters stay the bf16 ones under their names, so optimizers, checkpoints
and exports see no difference, and the backward pass keeps the bf16 inputs. Embedding, norms, attention and head stay in
bf16. Rounding takes passes over memory: it pays where blocks are compiled and layers are wide.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from models.blocks.weight_gradients import linear_layers
from models.spec import ModelSpec

PACKAGE = "torchao==0.18.0"
CAPABILITY = (8, 9)  # from which on torch._scaled_mm, which torchao calls, has kernels: Ada, Hopper and later
MULTIPLE = 16  # of features and of tokens, likewise


def is_installed() -> bool:
    """Whether torchao is there."""
    return importlib.util.find_spec("torchao") is not None


def obstacle(spec: ModelSpec) -> str | None:
    """Why the blocks of a model cannot do it, if so."""
    if spec.has_experts:
        return f"the experts of {spec.family.name} are no linear layers"
    with torch.device("meta"):
        sizes = {size for layer in linear_layers(spec.build(1)) for size in layer.weight.shape}
    odd = [size for size in sizes if size % MULTIPLE]
    return f"a linear layer of the blocks has {min(odd)} features, no multiple of {MULTIPLE}" if odd else None


def to_fp8(block: nn.Module, emulate: bool = False) -> None:
    """Let the linear layers inside of a module compute so; their parameters stay the same.

    Args:
        emulate: round as said and multiply in fp32, which any device can.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(block, config=Float8LinearConfig(emulate=emulate))

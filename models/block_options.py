"""Options of the blocks of a run: recomputation, offload, torch.compile, fp8. Only fp8 changes numbers.

fp8 (torchao, on GPUs that multiply it at twice the rate of bf16) rounds the factors of the linear layers' products,
each tensor scaled by its largest value: weights and inputs to e4m3, gradients of outputs to e5m2. Sums are fp32,
results bf16. Parameters stay bf16 under their names, so optimizers, checkpoints and exports see no difference.
Embedding, norms, attention and head stay in bf16. Rounding takes passes over memory: it pays where blocks are compiled
and layers are wide.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from models.layers import Block, Embedding
from models.offload import Returns
from models.spec import ModelSpec
from models.weight_gradients import linear_layers

FP8_PACKAGE = "torchao==0.18.0"
FP8_CAPABILITY = (8, 9)  # torch._scaled_mm, which torchao calls, has kernels for Ada, Hopper and later
FP8_MULTIPLE = 16  # features and tokens have to be a multiple of it for that kernel


def torchao_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def fp8_obstacle(spec: ModelSpec) -> str | None:
    """Say why a model's blocks cannot compute in fp8; None if they can."""
    if spec.has_experts:
        return f"the experts of {spec.family.name} are no linear layers"
    with torch.device("meta"):
        sizes = set(chain.from_iterable(layer.weight.shape for layer in linear_layers(spec.build(1))))
    if not sizes:
        return f"the weights of {spec.family.name} are [in, out], and its layers not torch's linear ones"
    odd = [size for size in sizes if size % FP8_MULTIPLE]
    return f"a linear layer of the blocks has {min(odd)} features, no multiple of {FP8_MULTIPLE}" if odd else None


def to_fp8(block: nn.Module, emulate: bool = False) -> None:
    """Make the linear layers inside a module multiply in fp8; their parameters stay.

    Args:
        emulate: round likewise and multiply in fp32, which any device can.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(block, config=Float8LinearConfig(emulate=emulate))


@dataclass(frozen=True)
class BlockOptions:
    """Options of the blocks."""

    # Layers that keep only their input, one hidden state instead of some thirty, and are computed a second time in the
    # backward pass: a third more arithmetic. Of the first layer, 0, it is the blocks of a tower.
    recompute: frozenset[int] = frozenset()
    offload: bool = False  # `models.offload`
    # torch.compile fuses the small operations between the matrix products. It compiles at the first steps, for seconds
    # up to a minute, one program for all lengths and all blocks of a kind. Attention document by document is not
    # compiled: the documents change with every micro-batch.
    compile: bool = False
    fp8: bool = False

    def apply(self, number: int, block: Embedding | Block, returns: Returns) -> None:
        """Prepare layer `number`; the layers of a chunk share `returns`."""
        block.recompute = number in self.recompute
        if isinstance(block, Embedding):
            return
        block.offload = returns if self.offload else None
        if self.fp8:
            to_fp8(block.block)
        if self.compile:
            block.block.compile(dynamic=True)


PLAIN = BlockOptions()

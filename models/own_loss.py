"""A user's loss in place of the cross-entropy: of each token by itself, so that no cut of a batch changes it.

The logits of a part of the tokens are made at a time, and again in the backward pass, as many as `models.lean_loss`
holds. Cost: the head's product twice, and autograd's copies of a part's logits. Unlike there, the product has the dtype
to train in, and is fp32 only after that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.layers import Head
from models.lean_loss import chunk_tokens

# Logits [T, V] in fp32 and what each token should have been, [T] -> the loss of each, [T].
TokenLoss = Callable[[Tensor, Tensor], Tensor]


def summed(own: TokenLoss, hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """The sum of a loss over tokens, whose normalised hidden states are [T, H]: a scalar in fp32."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return own(head.project(hidden).float(), targets).sum()

    size = chunk_tokens(len(head.projection()), hidden.is_cpu)
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.stack([checkpoint(part, *each, use_reentrant=False) for each in parts]).sum()

"""Process groups that share sequences or layers, and how a tensor passes between them, forward and backward.

A tensor is the same on all ranks of a group, in shards side by side, or in summands (Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share something, and this process's place among them.

    Attributes:
        rank: from 0 within the group.
        group: None where there is only one rank, or where only shapes count.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None

    def part(self, count: int) -> slice:
        """Get this rank's slice of `count` things, divided as evenly as possible."""
        each, more = divmod(count, self.size)
        begin = self.rank * each + min(self.rank, more)
        return slice(begin, begin + each + (self.rank < more))


ONE_RANK = RankGroup()


@dataclass(frozen=True)
class RankGroups:
    """The groups of a process: one shares its sequences, the other its layers."""

    sequence: RankGroup = ONE_RANK  # `models.parallel.sequence`
    tensor: RankGroup = ONE_RANK  # `models.parallel.tensor`


NO_GROUPS = RankGroups()


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        context.of_gradient = backward
        result = forward(tensor)
        if result is tensor:
            context.mark_dirty(tensor)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return context.of_gradient(gradients[0]), None, None


def communicate(tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `forward` to a tensor, and `backward` to the gradient of the result."""
    result: Tensor = _Apply.apply(tensor, forward, backward)
    return result


@torch.compiler.disable
def copied(tensor: Tensor, ranks: RankGroup) -> Tensor:
    """Pass on a tensor that is the same on all ranks; the backward pass sums its gradients."""
    return communicate(
        tensor,
        lambda tensor: tensor.view_as(tensor),
        lambda gradient: add_up(gradient.clone(memory_format=torch.contiguous_format), ranks),
    )


@torch.compiler.disable
def summed(tensor: Tensor, ranks: RankGroup) -> Tensor:
    """Sum over the ranks, in place; the gradient goes to each summand."""
    return communicate(tensor, lambda tensor: add_up(tensor, ranks), lambda gradient: gradient)


@torch.compiler.disable
def gathered(tensor: Tensor, ranks: RankGroup, width: int) -> Tensor:
    """Join shards of the last dimension: [..., own] -> [..., width]."""
    return communicate(
        tensor, lambda part: _join(part, ranks, width), lambda gradient: gradient[..., ranks.part(width)]
    )


@torch.compiler.disable
def take_shard(tensor: Tensor, ranks: RankGroup) -> Tensor:
    """Take this rank's shard of the last dimension: [..., width] -> [..., own]."""
    width = tensor.shape[-1]
    return communicate(
        tensor,
        lambda whole: whole[..., ranks.part(width)].contiguous(),
        lambda gradient: _join(gradient, ranks, width),
    )


def add_up(tensor: Tensor, ranks: RankGroup) -> Tensor:
    """Sum a contiguous tensor over the group, in place."""
    if ranks.group is not None:
        distributed.all_reduce(tensor, group=ranks.group)
    return tensor


def _join(part: Tensor, ranks: RankGroup, width: int) -> Tensor:
    """Join shards of unequal size by a sum, as not every backend gathers them."""
    whole = part.new_zeros(*part.shape[:-1], width)
    whole[..., ranks.part(width)] = part
    return add_up(whole, ranks)

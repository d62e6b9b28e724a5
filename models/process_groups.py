"""Groups of processes that share rows or layers, and what they do with a tensor, forward and backward.

A tensor is held alike by all of them, in parts side by side, or in summands (Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Peers:
    """A group of processes that share something.

    Attributes:
        size: how many they are.
        rank: which of them this one is, from 0.
        group: by which they reach each other; None where there is only one.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None

    def part(self, count: int) -> slice:
        """Get this process's slice of `count` things, as even as can be."""
        each, more = divmod(count, self.size)
        begin = self.rank * each + min(self.rank, more)
        return slice(begin, begin + each + (self.rank < more))


ALONE = Peers()


@dataclass(frozen=True)
class Sharing:
    """The groups that share a process's rows, and its layers.

    Attributes:
        sequence: who have the other tokens of the same rows (`models.attention.sequence_parallel`).
        tensor: who have the other parts of the same layers (`models.tensor_parallel`).
    """

    sequence: Peers = ALONE
    tensor: Peers = ALONE


NONE_SHARED = Sharing()


@torch.compiler.disable
def copied(tensor: Tensor, peers: Peers) -> Tensor:
    """Pass on what all hold alike; the backward pass sums its gradients."""
    copy: Tensor = _Copied.apply(tensor, peers)
    return copy


@torch.compiler.disable
def summed(tensor: Tensor, peers: Peers) -> Tensor:
    """Sum over the processes, in place; the gradient goes to each summand."""
    total: Tensor = _Summed.apply(tensor, peers)
    return total


@torch.compiler.disable
def gathered(tensor: Tensor, peers: Peers, width: int) -> Tensor:
    """Join shards of the last dimension: [..., own] -> [..., width]."""
    whole: Tensor = _Gathered.apply(tensor, peers, width)
    return whole


@torch.compiler.disable
def split(tensor: Tensor, peers: Peers) -> Tensor:
    """Take this process's shard of the last dimension: [..., width] -> [..., own]."""
    part: Tensor = _Split.apply(tensor, peers)
    return part


def add_up(tensor: Tensor, peers: Peers) -> Tensor:
    """Sum a contiguous tensor over the group, in place."""
    if peers.group is not None:
        distributed.all_reduce(tensor, group=peers.group)
    return tensor


def _join(part: Tensor, peers: Peers, width: int) -> Tensor:
    """Join shards of unequal size by a sum, as not every backend gathers them."""
    whole = part.new_zeros(*part.shape[:-1], width)
    whole[..., peers.part(width)] = part
    return add_up(whole, peers)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, peers: Peers) -> Tensor:
        context.peers = peers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return add_up(gradients[0].clone(memory_format=torch.contiguous_format), context.peers), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, peers: Peers) -> Tensor:
        context.mark_dirty(tensor)
        return add_up(tensor, peers)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor, peers: Peers, width: int) -> Tensor:
        context.part = peers.part(width)
        return _join(part, peers, width)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][..., context.part], None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, peers: Peers) -> Tensor:
        context.peers, context.width = peers, whole.shape[-1]
        return whole[..., peers.part(context.width)].contiguous()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _join(gradients[0], context.peers, context.width), None

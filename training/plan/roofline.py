"""How long kernels take on a device: by their arithmetic or by their memory traffic, whichever is longer.

A matrix product gets the share of the peak that large products get (`Device.products`), less where its result does not
fill all cores with tiles: the last wave of them takes as long as a full one. An attention kernel gets
`Device.attention` with long documents and less with short ones, and skips the half of the pairs that a causal mask
hides. All else goes at the memory's bandwidth. Each kernel takes a moment to begin and to end; and where the host
cannot launch them as fast as they are done, the device waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from models.costs import Operation
from training.metrics.devices import Device

TILE = 128  # rows and columns of the result that a core computes at a time (NVIDIA's guide to matrix multiplication)
PAIRS = 0.5  # of query and key, that a causal mask leaves


@dataclass(frozen=True)
class Spent:
    """Seconds by kind of work."""

    products: float = 0.0  # matrix products of the blocks
    attention: float = 0.0  # attention kernels; where scores lie in memory they are products and traffic
    traffic: float = 0.0  # norms, rotary angles, activation functions and residuals; the embedding
    launches: float = 0.0  # the device waits for the host to launch kernels
    sums: float = 0.0  # gradients are added up over the micro-batches
    loss: float = 0.0  # the projection to the vocabulary and the cross-entropy, forward and backward
    optimizer: float = 0.0  # the gradient's norm and the optimizer's step
    replicas: float = 0.0  # gradients are summed over the replicas, and weights handed round, with nothing to compute
    exchanges: float = 0.0  # heads for tokens, among processes with the same rows
    all_reduces: float = 0.0  # of hidden states, and what else is joined, among processes with the same layers
    offload: float = 0.0  # activations go to main memory or come back, with nothing to compute

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def times(self, factor: float) -> Spent:
        return Spent(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True)
class Roofline:
    """A device that computes in `dtype`.

    Attributes:
        length: of a row, which was counted as one document; a window where that is shorter.
        document: tokens that the document of a token has, in the mean; of those likewise a window.
    """

    device: Device
    dtype: torch.dtype
    length: float
    document: float

    def seconds(self, operation: Operation) -> float:
        """Of one kernel."""
        flops = self.device.products * self.device.flops(self.dtype)
        arithmetic = 0.0
        if operation.kind == "products":
            count, rows, columns = operation.shape
            tiles = count * math.ceil(rows / TILE) * math.ceil(columns / TILE)
            waves = math.ceil(tiles / self.device.cores) * self.device.cores / tiles
            arithmetic = operation.flops * waves / (self.device.products * self.device.fp8 if operation.fp8 else flops)
        elif operation.kind == "attention":
            rate = self.device.attention * flops * self.document / (self.document + self.device.half_length)
            arithmetic = PAIRS * operation.flops * self.document / self.length / rate
        return max(arithmetic, operation.bytes / self.device.bandwidth) + self.device.kernel

    def pass_of(self, operations: Iterable[Operation]) -> Spent:
        """Of the kernels of one pass through a layer."""
        seconds = dict.fromkeys(("products", "attention", "traffic"), 0.0)
        launches = 0.0
        for operation in operations:
            seconds[operation.kind] += self.seconds(operation)
            launches += self.device.launch
        return Spent(**seconds, launches=max(0.0, launches - sum(seconds.values())))

"""Where a rank's DeepSpeed engine keeps the optimizer's state of which weights.

DeepSpeed has five optimizers, and each cuts the weights in its own way: ZeRO 1 and 2 and the bf16 optimizer join those
of a group into one vector and give each replica a range of it; ZeRO 3 gives each rank a range of every weight; without
ZeRO they stay whole. Here all of them are lists of slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """A range of a weight's elements that this rank updates.

    Attributes:
        name: `<layer>.<name>` of the weight.
        offset: where the range begins in the flattened weight.
        numel: how many elements it has.
        owner: the tensor that the optimizer updates and keeps its state under; it holds the range in fp32.
        start: where the range begins in the flattened owner.
    """

    name: str
    offset: int
    numel: int
    owner: Tensor
    start: int


def slices_of(engine: DeepSpeedEngine) -> list[Slice]:
    """What this rank updates, in the order of the optimizer's own numbering."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(_of_stage_3(optimizer))
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(_of_ranges(optimizer, optimizer.bit16_groups))
    if isinstance(optimizer, BF16_Optimizer):
        return list(_of_ranges(optimizer, optimizer.bf16_groups))
    masters = [group["params"] for group in optimizer.param_groups]
    weights = optimizer.fp16_groups if isinstance(optimizer, FP16_UnfusedOptimizer) else masters
    return [
        Slice(engine.param_names[weight], 0, weight.numel(), master, 0)
        for owners, members in zip(masters, weights, strict=True)
        for master, weight in zip(owners, members, strict=True)
    ]


def _of_ranges(optimizer: Any, weights: list[list[Tensor]]) -> Iterator[Slice]:
    for group, members in zip(optimizer.param_groups, weights, strict=True):
        (owner,) = group["params"]
        for weight in members:
            place: Any = weight
            if place._hp_mapping is not None:  # else another replica has it
                here, there = place._hp_mapping.hp_fragment_address, place._hp_mapping.lp_fragment_address
                yield Slice(optimizer.param_names[weight], there.start, here.numel, owner, here.start)


def _of_stage_3(optimizer: Any) -> Iterator[Slice]:
    for owner, members in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        start = 0
        for weight in members:
            share = weight.partition_numel()  # padded, the same on every rank
            offset = share * optimizer._get_param_partition_rank(weight)
            numel = max(0, min(share, weight.ds_numel - offset))
            yield Slice(optimizer.param_names[weight], offset, numel, owner, start)
            start += share

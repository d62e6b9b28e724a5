"""The replicas of a stage sum their gradients while the stage still computes: ZeRO-1 in a pipeline.

DeepSpeed 0.19.8 begins when the stage is done, and gives every replica the sums of all weights, of which it updates its
own partition only. Here the sum of a weight goes to the replica that owns it, by a reduce (several own parts of a
weight that lies across their border), and starts when the last micro-batch's gradient has come: the head's first, while
the layers before it are in their backward pass. A weight is a bucket of its own, where it lies. The sums, rounded to
`communication_data_type`, are DeepSpeed's: to the last bit with two replicas, with more in the order in which the
library adds. In bf16, where DeepSpeed takes the gradient's norm of all sums, each replica gives that of its partition.

Cost: half the bytes of an all-reduce, c (n - 1) / n a number of c bytes for n replicas. As all of a weight goes to one
replica, it takes c / bandwidth. In bf16 the rounded numbers lie beside the sums until the stage is done.

No deadlock: all replicas of a stage start their sums in one order, backwards through the layers. A weight that has no
gradient in some micro-batch is waited for, with all behind it, until the stage is done. As replicas run one schedule, a
sum has one place among their messages to other stages as well. So even if a device ran all communication one by one as
it was started, the replicas of a stage would wait like one, and the schedule of one pipeline has no circle. The ends of
a tied weight are first added up over their stages, so this weight comes last. The host waits for nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from itertools import accumulate
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, distributed

from training.distributed.communication_wait import wait


class ReplicaSums(ABC):
    """What a rank still has to sum in this step, and what is under way.

    Attributes:
        places: of each weight, the parameter group and where in it the weight begins.
        sizes: of a replica's partition of each group.
    """

    places: dict[Tensor, tuple[int, int]]
    sizes: list[int]

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer, module = engine, engine.optimizer, engine.module
        self.replicas = self.optimizer.dp_process_group
        self.rank = distributed.get_rank(self.replicas)
        self.take_over()
        tied = dict(module.get_tied_weights_and_groups())
        backwards = [weight for weight in reversed(list(module.parameters())) if weight in self.places]
        self._order: list[Tensor] = sorted(backwards, key=lambda weight: weight in tied)
        # How many gradients a micro-batch brings: one from each chunk of layers that has the weight.
        chunks = getattr(module, "phase_funcs", [module.forward_funcs])
        held = (weight for chunk in chunks for weight in {each for layer in chunk for each in layer.parameters()})
        self._in_micro_batch: dict[Tensor, float] = {**Counter(held), **dict.fromkeys(tied, math.inf)}
        self._begin_step()
        for weight in backwards:
            weight.register_post_accumulate_grad_hook(self._arrived)  # after DeepSpeed's, which adds it up

    @abstractmethod
    def take_over(self) -> None:
        """Find `places` and `sizes`, and have `finish` called in place of DeepSpeed's sums."""

    @abstractmethod
    def gradient(self, weight: Tensor) -> Tensor:
        """Where the optimizer looks for the gradient of a weight; zeros where there is none."""

    def finish(self) -> list[Tensor]:
        """Start what is left; the sums of this replica's partition then are where the gradients were.

        Returns:
            them, without the second end of a tied weight.
        """
        while self._started < len(self._order):
            self._start_next()
        for reduced in self._under_way:
            wait(reduced)
        for _, gradient, total in self._own:
            if gradient.dtype != total.dtype:
                gradient.copy_(total)
        summed = [gradient for weight, gradient, _ in self._own if not weight.ds_pipe_replicated]
        self._begin_step()
        return summed

    def _begin_step(self) -> None:
        self._arrivals: Counter[Tensor] = Counter()
        self._started = 0
        self._under_way: list[Any] = []
        self._own: list[tuple[Any, Tensor, Tensor]] = []  # weights, parts of their gradients, and the sums of these

    def _arrived(self, weight: Tensor) -> None:
        """Count a gradient, and start the sums of what is complete."""
        self._arrivals[weight] += 1
        assert not self._complete(weight, and_more=1), "a gradient came after its sum had started"
        while self._started < len(self._order) and self._complete(self._order[self._started]):
            self._start_next()

    def _complete(self, weight: Tensor, and_more: int = 0) -> bool:
        return self._arrivals[weight] >= self._in_micro_batch[weight] * self.engine.micro_batches + and_more

    @torch.no_grad()
    def _start_next(self) -> None:
        weight = self._order[self._started]
        self._started += 1
        (group, begin), gradient = self.places[weight], self.gradient(weight).view(-1)
        size, end = self.sizes[group], begin + len(gradient)
        sent = gradient.to(self.engine.communication_data_type).div_(self.replicas.size())
        for owner in range(begin // size, (end - 1) // size + 1):
            part = slice(max(0, owner * size - begin), (owner + 1) * size - begin)
            self._under_way.append(distributed.reduce(sent[part], group=self.replicas, group_dst=owner, async_op=True))
            if owner == self.rank:
                self._own.append((weight, gradient[part], sent[part]))


class Bf16ReplicaSums(ReplicaSums):
    """For BF16_Optimizer, which adds each parameter group's gradients up in one fp32 tensor."""

    def take_over(self) -> None:
        optimizer = self.optimizer
        self.sizes = [partitions[0].numel() for partitions in optimizer.bf16_partitioned_groups]
        self._numbers = {weight: number for weights in optimizer.bf16_groups for number, weight in enumerate(weights)}
        self.places = {
            weight: (group, begin)
            for group, weights in enumerate(optimizer.bf16_groups)
            for weight, begin in zip(weights, accumulate(map(Tensor.numel, weights), initial=0), strict=False)
        }
        everything = optimizer.get_grads_for_norm
        summed: list[Tensor] = []

        def reduce() -> None:
            summed[:] = self.finish()

        def for_norm(for_clipping: bool = False) -> Any:
            return everything(for_clipping=True) if for_clipping else ([self._norm(summed)], {})

        self.engine._bf16_reduce_grads, optimizer.get_grads_for_norm = reduce, for_norm

    def gradient(self, weight: Tensor) -> Tensor:
        group, number = self.places[weight][0], self._numbers[weight]
        gradient: Tensor = self.optimizer.fp32_groups_gradients[group][number]
        return gradient if self.optimizer.fp32_groups_has_gradients[group][number] else gradient.zero_()

    def _norm(self, summed: list[Tensor]) -> Tensor:
        """Of the sums on all replicas of this stage, each of which has a part of them."""
        squares = torch.zeros((), device=self.engine.device)
        for gradient in summed:
            squares += gradient.norm().square()
        distributed.all_reduce(squares, group=self.replicas)
        return squares.sqrt()


class ZeroReplicaSums(ReplicaSums):
    """For DeepSpeedZeroOptimizer, in fp32 and fp16, which leaves gradients where autograd puts them."""

    def take_over(self) -> None:
        optimizer = self.optimizer
        self.sizes = optimizer.partition_size
        self.places = {
            weight: (group, begin)
            for group, weights in enumerate(optimizer.round_robin_bit16_groups)
            for weight, begin in zip(weights, optimizer.round_robin_bit16_offsets[group], strict=True)
        }
        optimizer.setup_buckets = optimizer.reduce_ipg_grads = lambda: None
        optimizer.reduce_gradients = lambda pipeline_parallel: self.finish()

    def gradient(self, weight: Tensor) -> Tensor:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        return weight.grad

    def finish(self) -> list[Tensor]:
        summed = super().finish()
        self.optimizer.overlapping_partition_gradients_reduce_epilogue()
        return summed


def sum_while_computing(engine: Any) -> None:
    """Let the replicas of a pipeline's stage do so."""
    sums = Bf16ReplicaSums if isinstance(engine.optimizer, BF16_Optimizer) else ZeroReplicaSums
    sums(engine)

"""Sum the replicas' gradients while their stage still computes (ZeRO-1 in a pipeline).

DeepSpeed 0.19.8 starts when the stage is done, and gives every replica the sums of all weights, though it updates only
its own partition. Here each weight's sum goes by a reduce to the replica that owns the weight (or to several that own
parts of it), and starts when the gradient of the last micro-batch is complete: the head's first, while earlier layers
are in their backward pass. There are no buckets. The sums, rounded to `communication_data_type`, equal DeepSpeed's: to
the last bit with two replicas; with more, up to the order in which the library adds. In bf16 each replica computes the
norm of its partition, where DeepSpeed computes it over all sums.

Cost: half the bytes of an all-reduce, c (n - 1) / n per number of c bytes for n replicas. As a whole weight goes to one
replica, it takes c / bandwidth. In bf16 the rounded numbers stay beside the sums until the stage is done.

No deadlock: all replicas of a stage start their sums in the same order, backwards through the layers. A weight without
a gradient in some micro-batch holds up all behind it until the stage is done. Replicas run the same schedule, so sums
also have the same position among the messages to other stages. Even if a device ran all communication serially, the
replicas would wait as one, and the schedule of one pipeline has no cycle. The ends of a tied weight are first added up
over their stages, so this weight comes last. The host never waits.
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

from training.distributed.communication import wait


class ReplicaSums(ABC):
    """The gradient sums of a rank in one step: started and still to start.

    Attributes:
        places: weight -> parameter group, and the weight's offset in it.
        sizes: elements of a replica's partition of each group.
    """

    places: dict[Tensor, tuple[int, int]]
    sizes: list[int]

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer, module = engine, engine.optimizer, engine.module
        self.replicas = self.optimizer.dp_process_group
        self.rank = distributed.get_rank(self.replicas)
        self.replace_deepspeed()
        tied = dict(module.get_tied_weights_and_groups())
        backwards = [weight for weight in reversed(list(module.parameters())) if weight in self.places]
        self._order: list[Tensor] = sorted(backwards, key=lambda weight: weight in tied)
        # A weight gets one gradient per micro-batch from each chunk of layers that has it.
        chunks = getattr(module, "phase_funcs", [module.forward_funcs])
        held = (weight for chunk in chunks for weight in {each for layer in chunk for each in layer.parameters()})
        self._in_micro_batch: dict[Tensor, float] = {**Counter(held), **dict.fromkeys(tied, math.inf)}
        self._begin_step()
        for weight in backwards:
            weight.register_post_accumulate_grad_hook(self._arrived)  # after DeepSpeed's, which adds it up

    @abstractmethod
    def replace_deepspeed(self) -> None:
        """Set `places` and `sizes`, and make DeepSpeed call `finish` instead of its own sums."""

    @abstractmethod
    def gradient(self, weight: Tensor) -> Tensor:
        """Return the tensor that the optimizer reads as a weight's gradient; zeros if it has none."""

    def finish(self) -> list[Tensor]:
        """Start the remaining sums, wait for all, and write those of this partition over its gradients.

        Returns:
            The sums, without the second end of a tied weight.
        """
        while self._started < len(self._order):
            self._start_next()
        for reduced in self._in_flight:
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
        self._in_flight: list[Any] = []
        self._own: list[tuple[Any, Tensor, Tensor]] = []  # weights, parts of their gradients, and the sums of these

    def _arrived(self, weight: Tensor) -> None:
        """Count a gradient, and start the sums that are complete and next in order."""
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
            self._in_flight.append(distributed.reduce(sent[part], group=self.replicas, group_dst=owner, async_op=True))
            if owner == self.rank:
                self._own.append((weight, gradient[part], sent[part]))


class Bf16ReplicaSums(ReplicaSums):
    """For BF16_Optimizer, which adds each parameter group's gradients up in one fp32 tensor."""

    def replace_deepspeed(self) -> None:
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
        """Return the norm over the partitions of all replicas of this stage."""
        squares = torch.zeros((), device=self.engine.device)
        for gradient in summed:
            squares += gradient.norm().square()
        distributed.all_reduce(squares, group=self.replicas)
        return squares.sqrt()


class ZeroReplicaSums(ReplicaSums):
    """For DeepSpeedZeroOptimizer, in fp32 and fp16, which leaves gradients where autograd puts them."""

    def replace_deepspeed(self) -> None:
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
    """Make the replicas of a pipeline stage sum this way."""
    sums = Bf16ReplicaSums if isinstance(engine.optimizer, BF16_Optimizer) else ZeroReplicaSums
    sums(engine)

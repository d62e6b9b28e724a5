"""Sum the replicas' gradients while their stage still computes (ZeRO-1 in a pipeline).

DeepSpeed 0.19.8 starts when the stage is done, and gives every replica the sums of all weights, though it updates only
its own partition. Here each weight's sum goes by a reduce to the replica that owns the weight (or to several that own
parts of it), and starts when the gradient of the last backward pass is complete: the head's first, while earlier layers
are in their backward pass. There are no buckets. The sums, rounded to `communication_data_type`, equal DeepSpeed's: to
the last bit with two replicas; with more, up to the order in which the library adds. In bf16 each replica computes the
norm of its partition, where DeepSpeed computes it over all sums.

Cost: half the bytes of an all-reduce, c (n - 1) / n per number of c bytes for n replicas. As a whole weight goes to one
replica, it takes c / bandwidth. In bf16 the rounded numbers stay beside the sums until the stage is done.

No deadlock: all replicas of a stage start their sums in the same order, backwards through the layers. A weight without
a gradient in some micro-batch holds up all behind it until the stage is done. Sums start in the last backward pass of a
stage, behind all its messages but the last gradient. So even if a device ran all communication serially, replicas would
wait with nothing left to do for the stages behind them, and those in front wait for that gradient anyway. The ends of a
tied weight are first added up over their stages, so this weight comes last. The host never waits.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, chain
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, distributed

from training.distributed.communication import wait


class ReplicaSums:
    """The gradient sums of a rank in one step: started and still to start; replaces DeepSpeed's own.

    BF16_Optimizer adds each parameter group's gradients up in one fp32 tensor; DeepSpeedZeroOptimizer, in fp32 and
    fp16, leaves them where autograd puts them.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer, module = engine, engine.optimizer, engine.module
        optimizer, self._bf16 = engine.optimizer, isinstance(engine.optimizer, BF16_Optimizer)
        self._replicas = optimizer.dp_process_group
        self._rank = distributed.get_rank(self._replicas)
        if self._bf16:
            groups = optimizer.bf16_groups
            offsets = [accumulate(map(Tensor.numel, weights), initial=0) for weights in groups]
            self._sizes = [partitions[0].numel() for partitions in optimizer.bf16_partitioned_groups]
            every_gradient = optimizer.get_grads_for_norm
            engine._bf16_reduce_grads = self._finish
            optimizer.get_grads_for_norm = lambda for_clipping=False: (
                every_gradient(for_clipping=True) if for_clipping else ([self._norm], {})
            )
        else:
            groups, offsets = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets
            self._sizes = optimizer.partition_size
            optimizer.setup_buckets = optimizer.reduce_ipg_grads = lambda: None
            optimizer.reduce_gradients = lambda pipeline_parallel: self._finish()

        # weight -> its parameter group, its number there, and where it begins in the group's flat tensor
        self._places: dict[Tensor, tuple[int, int, int]] = {}
        for group, weights in enumerate(groups):
            for number, (weight, begin) in enumerate(zip(weights, offsets[group], strict=False)):
                self._places[weight] = group, number, begin

        # Sums start in the order in which gradients come, those of tied weights last.
        tied = dict(module.get_tied_weights_and_groups())
        backwards = [weight for weight in reversed(list(module.parameters())) if weight in self._places]
        self._order: list[Tensor] = sorted(backwards, key=lambda weight: weight in tied)

        # A weight gets one gradient per micro-batch from each chunk of layers that has it.
        held = Counter[Tensor]()
        for chunk in getattr(module, "phase_funcs", [module.forward_funcs]):
            held.update(set(chain.from_iterable(layer.parameters() for layer in chunk)))
        self._in_micro_batch: dict[Tensor, float] = {**held, **dict.fromkeys(tied, math.inf)}
        self._begin_step()
        for weight in backwards:
            weight.register_post_accumulate_grad_hook(self._arrived)  # after DeepSpeed's, which adds it up

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
        return self._arrivals[weight] >= self._in_micro_batch[weight] * self._engine.backward_passes + and_more

    @torch.no_grad()
    def _start_next(self) -> None:
        weight = self._order[self._started]
        self._started += 1
        group, number, begin = self._places[weight]
        gradient = self._gradient(weight, group, number).view(-1)
        size, end = self._sizes[group], begin + len(gradient)
        sent = gradient.to(self._engine.communication_data_type).div_(self._replicas.size())
        for owner in range(begin // size, (end - 1) // size + 1):
            part = slice(max(0, owner * size - begin), (owner + 1) * size - begin)
            self._in_flight.append(distributed.reduce(sent[part], group=self._replicas, group_dst=owner, async_op=True))
            if owner == self._rank:
                self._own.append((weight, gradient[part], sent[part]))

    def _gradient(self, weight: Tensor, group: int, number: int) -> Tensor:
        """Return the tensor that the optimizer reads as a weight's gradient; zeros if it has none."""
        if self._bf16:
            gradient: Tensor = self._optimizer.fp32_groups_gradients[group][number]
            return gradient if self._optimizer.fp32_groups_has_gradients[group][number] else gradient.zero_()
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        return weight.grad

    def _finish(self) -> None:
        """Start the remaining sums, wait for all, and write those of this partition over its gradients."""
        while self._started < len(self._order):
            self._start_next()
        for reduced in self._in_flight:
            wait(reduced)
        for _, gradient, total in self._own:
            if gradient.dtype != total.dtype:
                gradient.copy_(total)
        if self._bf16:
            squares = torch.zeros((), device=self._engine.device)
            for weight, gradient, _ in self._own:
                if not weight.ds_pipe_replicated:
                    squares += gradient.norm().square()
            distributed.all_reduce(squares, group=self._replicas)
            self._norm = squares.sqrt()
        else:
            self._optimizer.overlapping_partition_gradients_reduce_epilogue()
        self._begin_step()

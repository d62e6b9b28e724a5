"""The most memory that each stage needs at once.

Weights, gradients and optimizer states stay (`training.plan.optimizer_memory`). On top of them comes the larger of two
peaks: the activations of all micro-batches that are under way, or the optimizer's step, before which they are gone. How
many are under way follows from the schedule: with 1F1B, min(m, P - s) on stage s of P. For each of them a stage keeps
what it received, what it sent, and what autograd saves of its layers (`models.costs`); with
recomputation only the blocks' inputs, and the inside of one block while that is done again. The last stage adds the
loss (`models.lean_loss`): a chunk of logits, and the gradient of the head in fp32. Of rows and layers that several
processes share counts the part that one has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy
from numpy.typing import NDArray

from models.costs import Saved
from models.lean_loss import CPU_CHUNK, GPU_CHUNK
from training.config.deepspeed_config import training_dtype
from training.optimizer.optimizers import PIECE
from training.plan.basis import Basis
from training.plan.casts import HELD_COMPILED, HELD_EAGER
from training.plan.costs import kept_without_offload, saved, sent_away
from training.plan.optimizer_memory import StateBytes
from training.plan.partition import LayerRange, layers_of
from training.schedule.simulation import count_in_flight

BACKWARD = 3  # tensors as large as the largest saved one that a backward pass holds besides


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank.

    Attributes:
        weights, gradients, optimizer: all the time.
        activations: at most, with what the backward pass and the loss take for themselves.
        step: what the sum of gradients and the optimizer's step take, when the activations are gone.
        host: in main memory, under offload.
        beyond: what was measured beyond all that (`training.plan.feedback`).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    step: int
    host: int
    beyond: int

    @property
    def peak(self) -> int:
        most = max(self.activations, self.step)
        return self.weights + self.gradients + self.optimizer + most + self.beyond


class MemoryModel:
    """What the stages of a run take on a device; of the workload the longest rows count."""

    def __init__(self, basis: Basis) -> None:
        self._basis = basis
        self._config, self._spec, self._device = basis.config, basis.spec, basis.device
        self._states = StateBytes.of(self._config)
        self._itemsize = training_dtype(self._config).itemsize
        self._tokens = basis.share.rows * basis.share.longest
        self._head, self._tied = self._spec.n_layers - 1, self._spec.tied
        self._hidden = self._tokens * self._spec.config.hidden_size * self._itemsize  # bytes of hidden states
        # Whether what blocks keep waits in another memory than the device's.
        self._elsewhere = self._config.offload_activations and self._device.reserves
        ranks, beyond = self._config.model_topo.stages, basis.measured.beyond if basis.measured else [0]
        self._beyond = beyond if len(beyond) == ranks else [max(beyond)] * ranks
        shapes = map(basis.shapes, range(self._spec.n_layers))
        self._largest = [max(map(prod, each.values())) for each in shapes]  # elements of each layer's largest weight
        self._weights = [0, *accumulate(basis.parameters)]  # parameters of the first so many layers

    def rank(self, rank: int, ranges: Sequence[LayerRange]) -> StageMemory:
        """Of the rank that holds these layers: one range, or two with the V schedule."""
        states = self._states
        held = sum(self._weights[end] - self._weights[begin] for begin, end in ranges)
        if self._tied and {0, self._head} <= {layer for b, e in ranges for layer in (b, e - 1)}:
            held -= self._basis.shapes(0)[self._spec.family.tie.embedding].numel()  # both ends are one parameter
        of_ranges = [self._of_range(*each) for each in ranges]
        kept = [number for of_whole, of_waiting, _, _ in of_ranges for number in (of_whole, of_waiting)]
        activations = int(self._moments[rank].dot(kept).max())
        passing = max(of_pass for _, _, of_pass, _ in of_ranges)
        passing += sum(away for _, _, _, away in of_ranges)  # on its way back, for the next block
        offloaded = max(self._largest) * self._itemsize if states.host else 0
        optimizer = int(held * states.optimizer)
        working = int(states.working * min(held, PIECE))
        bucket = int(states.bucket * (states.bucket_size if self._device.reserves else min(held, states.bucket_size)))
        host = int(held * states.host)
        if self._device.memory is None and not self._device.reserves:  # on a CPU all of it is main memory
            optimizer, host = optimizer + host, 0
        return StageMemory(
            weights=int(held * states.weight),
            gradients=int(held * states.gradient),
            optimizer=optimizer,
            activations=activations + passing + offloaded,
            step=max(int(held * states.step) + working, bucket) + offloaded,
            host=host,
            beyond=self._beyond[rank],
        )

    def fits(self, rank: int, ranges: Sequence[LayerRange]) -> bool:
        """Whether the device has the memory; always, where nothing is known about it."""
        return self._device.memory is None or self.rank(rank, ranges).peak <= self._device.memory

    def fewest_recomputed(self, rank: int, ranges: Sequence[LayerRange]) -> frozenset[int]:
        """The layers that a rank recomputes so that these fit: of its blocks as few as do, the first ones."""
        blocks = [layer for layer in layers_of(ranges) if 0 < layer <= self._spec.n_blocks]

        def fits(count: int) -> bool:
            return MemoryModel(replace(self._basis, recompute=frozenset(blocks[:count]))).fits(rank, ranges)

        return frozenset(blocks[: bisect_left(range(len(blocks)), True, key=fits)])  # all where that is not enough

    @cached_property
    def _saved(self) -> list[Saved]:
        return saved(self._basis)

    @cached_property
    def _away(self) -> list[int]:
        return sent_away(self._basis)

    @cached_property
    def _inside(self) -> list[int]:
        """Bytes that the first so many layers keep of a micro-batch."""
        kept = zip(kept_without_offload(self._basis), self._away, strict=True)
        return [0, *accumulate(of_layer - away for of_layer, away in kept)]

    @cached_property
    def _moments(self) -> list[NDArray[Any]]:
        """Of each rank: of how many micro-batches its stages keep all, and what waits, at the worst moments."""
        found = count_in_flight(self._basis.schedule, self._config.model_topo.stages, self._basis.micro_batches)
        return [numpy.array(moments, dtype=numpy.int64).reshape(len(moments), -1) for moments in found]

    @cached_property
    def _of_range(self) -> Callable[[int, int], tuple[int, int, int, int]]:
        """What a stage keeps of a micro-batch, also where that waits, what a pass takes, and most of a layer away."""
        return cache(
            lambda *each: (self._kept(*each), self._waiting(*each), self._passing(*each), self._most_away(*each))
        )

    def _most_away(self, begin: int, end: int) -> int:
        return max(self._away[begin:end])

    def _kept(self, begin: int, end: int) -> int:
        """Bytes that a stage keeps of one micro-batch: received, sent, saved, and the masks once."""
        arguments = max(self._saved[layer].arguments for layer in range(begin, end))
        borders = (begin > 0) + (end <= self._head)
        return self._inside[end] - self._inside[begin] + arguments + borders * self._hidden

    def _waiting(self, begin: int, end: int) -> int:
        """Bytes kept of a micro-batch whose gradients of weights wait (`models.weight_gradients`)."""
        if self._config.offload_activations:
            return 0
        blocks = (layer for layer in range(begin, end) if layer not in self._basis.recomputed)
        return sum(self._saved[block].waiting for block in blocks)

    def _passing(self, begin: int, end: int) -> int:
        """Bytes that the pass of one micro-batch takes for itself: of a block, whose gradients arrive, or the loss."""
        blocks = [layer for layer in range(begin, end) if 0 < layer < self._head]
        whole = [b for b in blocks if self._elsewhere or b in self._basis.recomputed]
        again = max((self._saved[block].inside for block in whole), default=0)
        backward = BACKWARD * max((self._saved[block].largest for block in blocks), default=0)
        arriving = max((self._largest[layer] for layer in range(begin, min(end, self._head))), default=0)
        arriving *= self._itemsize
        if self._basis.in_fp8:
            compiled = self._config.compiles(self._device.ampere, experts=False)
            factor = max((max(self._saved[b].largest // self._itemsize, self._largest[b]) for b in blocks), default=0)
            backward += factor * (HELD_COMPILED if compiled else HELD_EAGER)
        return max(again + backward + arriving, self._loss if end > self._head else 0)

    @cached_property
    def _loss(self) -> int:
        """Bytes that the loss takes, next to the normalised hidden states."""
        shape = self._basis.shapes(self._head)[self._spec.family.tie.head]
        tokens = int(self._tokens * self._basis.workload.supervised)
        chunk = min(GPU_CHUNK if self._device.reserves else CPU_CHUNK, 4 * tokens * shape[0])
        copies = 1.0 + (0.5 if self._itemsize == 2 else 0.0)  # with their gradient in 16 bits
        if getattr(self._spec.config, "final_logit_softcapping", None):
            copies += 1
        rounded = shape.numel() * self._itemsize if self._itemsize == 2 else 0  # when the backward pass hands it on
        return max(int(chunk * copies), rounded) + 4 * shape.numel() + tokens * shape[1] * (self._itemsize + 4)

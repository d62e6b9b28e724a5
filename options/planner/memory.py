"""Peak memory of each stage.

Weights, gradients and optimizer states stay. On top of them comes the larger of two peaks: the activations of all
micro-batches in flight, or the optimizer's step, before which activations are freed. The schedule decides how many
micro-batches are in flight: with 1F1B, min(m, P - s) on stage s of P. For each a stage keeps its input and output, and
what autograd saves of its layers (`options.planner.layer_costs`); with recomputation only the blocks' inputs, and the
inside of one block during its backward pass. The last stage adds the loss (`models.loss.lean`): a chunk of logits, and
the gradient of the head in fp32. Under sequence and tensor parallelism a rank's shards count. Of rows in chunks a stage
keeps that of the chunks in flight, and keys and values of whole rows with, on the way back, sums of their gradients.
The first stage keeps the pixels of its micro-batches, and what their tower saves (`options.planner.tower`).

Bytes per parameter are those of DeepSpeed 0.19.8, more than the textbook's 16 (`runtime/bf16_optimizer.py` and
`runtime/zero/stage_1_and_2.py` there). Master weights and states are sharded over the replicas, in bf16 at stage 0 too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain
from math import prod
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from models.loss.lean import CPU_CHUNK, GPU_CHUNK
from models.quantized_base import BYTES
from options.planner import zero
from options.planner.inputs import Basis
from options.planner.partition import LayerRange, layers_of
from options.planner.saved import BACKWARD, block_peaks, carried_numbers, saved_tensors
from options.planner.simulation import chunks_in_flight, moments_in_flight
from options.planner.tower import tower_memory
from training.config.keys import TrainConfig
from training.config.precision import training_dtype
from training.engine import host_sums
from training.metrics.devices import cpu_has_bf16
from training.optimizer.optimizers import PIECE

BUCKET = 500_000_000  # elements; DeepSpeed's default `reduce_bucket_size`
# On a CPU: kernels that oneDNN compiles at the first step, pages of libraries, holes between small tensors. Fitted to
# what `benchmarks.memory` finds above the tensors of a process: in fp32 some 15 MB (of a stage with a tower at rest 14:
# 7 of libraries, 7 of the heap and of arenas), in bf16 up to 35 MB; 8 to 19 MB less on a CPU for whose 16-bit numbers
# oneDNN has no kernels.
CPU_FP32, CPU_KERNELS, CPU_WITHOUT_KERNELS = 15_000_000, 25_000_000, 12_000_000
NARROWED = 7  # passes of the optimizer and of clipping over master weights and their gradients
SUMMED = 4  # bytes of the sum of a key's gradient, or a value's
# Bytes for an element of the largest fp8 factor while it is rounded: two copies in fp32 and the 8 bits; compiled, the
# 8 bits alone, for both factors in both orders.
FP8_EAGER, FP8_COMPILED = 9, 4
MASTER, REST = 4.0, 2.0  # of an fp32 weight, and of what a bf16 weight leaves of it


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter, on the device unless stated otherwise."""

    weight: float  # in the dtype of the computation
    sum: float  # of a gradient, in its dtype
    gradient: float  # the same on the device, from the first backward pass to the step
    optimizer: float  # master weight and states
    bucket_size: int  # elements of the buffer in which gradients are summed before the step
    working: float = 0.0  # temporaries of Lion's update, for a piece at a time
    step: float = 0.0  # temporaries of the optimizer's step: copies of the gradient, with SGD's decay added
    host: float = 0.0  # in main memory
    bucket: float = 0.0  # bytes of an element of the buffer; 0 where there is none
    master: float = MASTER  # the optimizer's weight, and the gradient that it gets beside it
    spared: float = 0.0  # that the optimizer's passes over main memory move less than those over numbers in fp32

    @classmethod
    def of(cls, config: TrainConfig) -> StateBytes:
        dtype, sharding = training_dtype(config), config.zero_optimization
        weight, replicas = float(dtype.itemsize), config.model_topo.replicas
        summed = config.data_types.grad_accum_dtype if config.data_types else "fp32"
        gradient = weight if dtype != torch.bfloat16 or sharding.stage == 0 or summed != "fp32" else 4.0
        optimizer = config.optimizer.type
        momentum = 4.0 if config.optimizer.params.get("momentum") else 0.0
        # Adafactor's rows and columns are about a thousandth of the weights.
        states = {"AdamW": 8.0, "Adam": 8.0, "Lion": 4.0, "Adafactor": 0.0, "SGD": momentum}[optimizer]
        size = int((sharding.model_extra or {}).get("reduce_bucket_size", BUCKET))
        decayed = 4.0 if optimizer == "SGD" and config.optimizer.params.get("weight_decay") else 0.0
        working = 8.0 if optimizer == "Lion" else 0.0
        sharded = cls(weight, gradient, gradient, (4 + states) / replicas, size, working, decayed)
        if dtype == torch.float32 and sharding.stage == 0:  # a weight is its own master
            return replace(sharded, optimizer=states)
        if sharding.offloads:  # with a copy of the gradient, which still passes through the bucket
            master = weight if config.bf16.enabled and config.bf16.bf16_master_weights_and_grads else 4.0
            narrow = states / 2 if master < 4 and config.optimizer.params.get("fp32_optimizer_states") is False else 0.0
            host = (2 * master + states - narrow + weight) / replicas
            spared = NARROWED * (4 - master) + 2 * narrow
            lean = replace(sharded, optimizer=0.0, working=0.0, step=0.0, master=master, spared=spared)
            if config.offload_gradients:  # where the copy is going to be, if this replica has it and it is as wide
                apart = gradient * (1 - 1 / replicas if gradient <= master else 1)
                return replace(lean, gradient=0.0, host=host + apart, bucket=gradient)
            return replace(lean, host=host, bucket=gradient)
        # In bf16 the sums are fp32 already, and replicas send each other rounded ones.
        if gradient > weight and sharding.stage < 2:
            sent = sent_bytes(config)
            return replace(sharded, step=max(decayed, sent if replicas > 1 and sent < gradient else 0.0))
        if dtype == torch.bfloat16 and sharding.stage == 0:  # the sharded gradient in fp32
            return replace(sharded, step=decayed + 4.0 / replicas)
        # The sharded gradient joined, in 16 bits and in fp32, or in fp32 alone; before the step, the bucket.
        copies = 4.0 if gradient > 2 else weight + 4.0
        bucket = 0.0 if config.sums_while_computing and config.model_topo.stages > 1 else weight
        return replace(sharded, step=decayed + copies / replicas, bucket=bucket)

    def checkpoint(self, replicas: int) -> float:
        """Return bytes per parameter in a checkpoint: the weight, and the master weight and states of all replicas."""
        apart = replicas - 1 if self.sum <= self.master else replicas
        copies = self.master + self.weight + (self.sum - self.gradient) * apart
        return self.weight + max(self.optimizer * replicas, self.host * replicas - copies)


def beside_weights(config: TrainConfig) -> tuple[float, float]:
    """Return bytes per parameter that stand on a host beside weight and sum, where weights are there (`pieces.py`).

    Returns:
        Of what makes the weight fp32, and of the optimizer's states.
    """
    zero = config.zero_optimization.model_copy(update={"stage": 1, "offload_optimizer": None})
    alone = config.model_copy(update={"zero_optimization": zero, "model_topo": config.model_topo.spread(1, 1)})
    averages = StateBytes.of(alone).optimizer - MASTER
    if config.bf16.enabled:
        return REST, averages / 2 if config.bf16.bf16_optimizer_states else averages
    return (0 if training_dtype(config) == torch.float32 else MASTER), averages


def _beside_tensors(dtype: torch.dtype) -> int:
    """Return bytes of a process on a CPU that no tensor holds."""
    if dtype == torch.float32:
        return CPU_FP32
    return CPU_KERNELS if cpu_has_bf16() else CPU_WITHOUT_KERNELS


def sent_bytes(config: TrainConfig) -> int:
    """Return bytes of a gradient's element between replicas."""
    dtype = config.communication_data_type
    if dtype is None:
        return training_dtype(config).itemsize
    return 4 if dtype == "fp32" else 2


def kept_bytes(basis: Basis) -> tuple[list[int], list[int]]:
    """Return bytes of a micro-batch that each layer keeps for its backward pass, on the device and in main memory.

    A layer that recomputes keeps its input.
    """
    work, last = basis.share, basis.spec.n_layers - 1
    tokens = work.rows * max(basis.longest_chunks)
    hidden = tokens * basis.spec.config.hidden_size * training_dtype(basis.config).itemsize
    kept = [hidden if layer in basis.recomputed else each.inside for layer, each in enumerate(saved_tensors(basis))]
    tower = tower_memory(basis)
    kept[0] += int(tower.pixels + tower.kept)
    if not (basis.config.offload_activations and basis.device.reserves):
        return kept, [0] * len(kept)
    return [kept[0], *[0] * (last - 1), kept[last]], [0, *kept[1:last], 0]


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank; weights, gradients and optimizer states all the time."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # at most, with temporaries of the backward pass and the loss
    step: int  # temporaries of the sum of gradients and the optimizer, when activations are freed
    host: int  # in main memory, under offload
    beyond: int  # kernels of a CPU, and what was measured above all that (`options.planner.feedback`)

    @property
    def peak(self) -> int:
        most = max(self.activations, self.step)
        return self.weights + self.gradients + self.optimizer + most + self.beyond


class MemoryModel:
    """Memory of a run's stages on a device, for the longest rows of the workload."""

    def __init__(self, basis: Basis) -> None:
        self._basis = basis
        self._config, self._spec, self._device = basis.config, basis.spec, basis.device
        self._states, self._saved = StateBytes.of(basis.config), saved_tensors(basis)
        self._itemsize = training_dtype(basis.config).itemsize
        self._tokens = basis.share.rows * max(basis.longest_chunks)
        self._hidden = self._tokens * basis.spec.config.hidden_size * self._itemsize  # bytes of hidden states
        self._head = basis.spec.n_layers - 1
        shapes = [basis.shapes(layer) for layer in range(basis.spec.n_layers)]
        self._largest = []  # elements of each layer's largest trained weight
        for of_layer, names in zip(shapes, basis.trained_names, strict=True):
            self._largest.append(max((prod(of_layer[name]) for name in names), default=0))
        self._widest = [max(map(prod, each.values())) for each in shapes]  # and of its largest weight
        self._weights = [0, *accumulate(basis.parameters)]  # cumulative parameter count
        self._trained = [0, *accumulate(basis.trained)]  # of those that are trained
        self._packed = [0, *accumulate(map(sum, basis.packed))]  # of those that are held in 4 or 8 bits
        self._packed_bytes = BYTES.get(basis.config.lora.base, 0.0) if basis.config.lora else 0.0  # of each
        kept, self._offloaded = kept_bytes(basis)
        self._inside = [0, *accumulate(kept)]  # cumulative bytes
        self._kernels = 0 if basis.device.reserves else _beside_tensors(training_dtype(basis.config))
        ranks, beyond = basis.config.model_topo.stages, basis.measured.beyond if basis.measured else [0]
        self._beyond = beyond if len(beyond) == ranks else [max(beyond)] * ranks
        # For each rank and moment: per chunk the micro-batches kept whole, and those whose weights wait.
        found = moments_in_flight(basis.schedule, ranks, basis.micro_batches)
        moments = [numpy.array(each, dtype=numpy.int64).reshape(len(each), -1) for each in found]
        self._moments: list[NDArray[Any]] = moments
        self._carried = [0, *accumulate(carried_numbers(basis))]
        self._peaks: list[int] = []  # of each layer, while a chunk goes back through it
        if len(cuts := basis.longest_chunks) > 1:
            self._peaks = block_peaks(basis, basis.recomputed)
            # Without stages a row goes back before the next one comes.
            passing = chunks_in_flight(cuts, ranks, basis.micro_batches if basis.in_stages else 1)
            self._moments = [numpy.array(each) / (max(cuts), 1, 1) for each in passing]
        self._tower = tower_memory(basis)
        self._of_chunk = cache(self._chunk)

    def rank(self, rank: int, ranges: Sequence[LayerRange]) -> StageMemory:
        """Return the memory of a rank with these layers: one range, or two with the V schedule."""
        states = self._states

        def between(cumulative: Sequence[int]) -> int:
            return sum(cumulative[end] - cumulative[begin] for begin, end in ranges)

        held, trained, packed = map(between, (self._weights, self._trained, self._packed))
        ends = {begin for begin, _ in ranges} | {end - 1 for _, end in ranges}
        if self._spec.tied and {0, self._head} <= ends:
            twice = self._basis.shapes(0)[EMBEDDING_WEIGHT].numel()  # both ends are one parameter
            held -= twice
            trained -= twice if EMBEDDING_WEIGHT in self._basis.trained_names[0] else 0
        kept, waiting, temporary, offloaded = zip(*(self._of_chunk(*each) for each in ranges), strict=True)
        counted = list(chain(*zip(kept, waiting, strict=True)))
        if self._peaks:
            carried = between(self._carried)
            counted = [*kept, carried * self._itemsize, carried * SUMMED]
        activations = int(self._moments[rank].dot(counted).max())
        activations += max(temporary) + sum(offloaded)  # on its way back, for the next block
        largest = max((self._largest[layer] for layer in layers_of(ranges)), default=0)
        update = largest * self._itemsize if states.host else 0
        moved = int(states.sum - states.gradient) if self._device.reserves else 0
        if moved:  # pieces of sums, gradients that wait for them; at the end one sum, or a copy of it too large to join
            activations += host_sums.BUFFERS * host_sums.PIECE * moved
            activations += self._itemsize * min(host_sums.AHEAD // self._itemsize + largest, trained)
            moved *= largest * (2 if largest > states.bucket_size else 1)
        optimizer = int(trained * states.optimizer)
        working = int(states.working * min(trained, PIECE))
        bucket = int(
            states.bucket * (states.bucket_size if self._device.reserves else min(trained, states.bucket_size))
        )
        host = int(trained * states.host)
        kept_weights, kept_gradients, gathered = zero.kept(self._config, held)
        if self._config.zero_optimization.stage > 1:  # the bucket is there while gradients come
            activations += bucket + gathered
            if self._config.zero_optimization.offloads:  # they leave
                kept_gradients = 0.0
        if self._device.memory is None and not self._device.reserves:  # on a CPU all of it is main memory
            optimizer, host = optimizer + host, 0
        return StageMemory(
            weights=int(((held - packed) * states.weight + packed * self._packed_bytes) * kept_weights),
            gradients=int(trained * states.gradient * kept_gradients),
            optimizer=optimizer,
            activations=activations + update,
            step=max(int(trained * states.step) + working, bucket + moved) + update,
            host=host,
            beyond=self._beyond[rank] + self._kernels,
        )

    def fits(self, rank: int, ranges: Sequence[LayerRange]) -> bool:
        """Say whether the rank's device has the memory; always, where that is not known."""
        memory = self._basis.of_stages[rank].memory
        return memory is None or self.rank(rank, ranges).peak <= memory

    def fewest_recomputed(self, rank: int, ranges: Sequence[LayerRange]) -> frozenset[int]:
        """Return the fewest blocks, a tower's and the first ones, that a rank recomputes so that these layers fit."""
        every = replace(self._basis, recompute=None).computed_again
        blocks = [layer for layer in layers_of(ranges) if layer in every]

        def fits(count: int) -> bool:
            return MemoryModel(replace(self._basis, recompute=frozenset(blocks[:count]))).fits(rank, ranges)

        return frozenset(blocks[: bisect_left(range(len(blocks)), True, key=fits)])  # all where that is not enough

    def _chunk(self, begin: int, end: int) -> tuple[int, int, int, int]:
        """Return a chunk's bytes: kept of a micro-batch, kept while it waits, temporaries of a pass, largest offloaded.

        Kept are input, output, saved tensors, and the masks once; for the gradients of weights that wait
        (`models.weight_gradients`) less.
        """
        arguments = max(self._saved[layer].arguments for layer in range(begin, end))
        borders = 2 if begin > 0 else 1  # what arrives and what leaves; the last stage's output waits for its loss
        kept = self._inside[end] - self._inside[begin] + arguments + borders * self._hidden
        if self._peaks:
            kept += self._beside_chunk(end)
        plain = range(begin, end if not self._config.offload_activations else begin)
        waiting = sum(self._saved[layer].waiting for layer in plain if layer not in self._basis.recomputed)
        temporary = self._temporary(begin, end)
        if begin == 0 and (tower := self._tower).pixels:
            # The tower runs before the blocks of its micro-batch keep anything, and goes back when they are done. On a
            # CPU what the loader made of the pixels stays until it makes the next.
            temporary = max(temporary, int(tower.pixels + tower.peak) - kept)
            temporary += 0 if self._device.reserves else int(tower.pixels)
        return kept, waiting, temporary, max(self._offloaded[begin:end])

    def _beside_chunk(self, end: int) -> int:
        """Return what is kept of a chunk besides what is kept of a micro-batch.

        Each has the position ids of its whole rows twice, as they came and as they were passed on. The gradient of the
        last hidden states, which the loss computes, waits until all chunks of the row have passed.
        """
        chunks, work = len(self._basis.longest_chunks), self._basis.workload
        positions = 2 * chunks * self._tokens * torch.int64.itemsize
        if end <= self._head:
            return positions
        width = self._basis.shapes(self._head)[HEAD_WEIGHT][1]
        return positions + int(self._tokens * work.supervised) * width * torch.float32.itemsize

    def _temporary(self, begin: int, end: int) -> int:
        """Return temporary bytes of a pass: of one block and its arriving gradients, or of the loss."""
        blocks = [layer for layer in range(begin, end) if 0 < layer < self._head]
        whole = [block for block in blocks if self._offloaded[block] or block in self._basis.recomputed]
        again = max((self._saved[block].inside for block in whole), default=0)
        backward = BACKWARD * max((self._saved[block].largest for block in blocks), default=0)
        if self._peaks:
            again, backward = 0, max((self._peaks[block] for block in blocks), default=0)
        arriving = self._itemsize * max(self._largest[begin : min(end, self._head)], default=0)
        if self._basis.in_fp8:
            compiled = self._config.compiles(self._device.ampere, experts=False)
            factor = max((max(self._saved[b].largest // self._itemsize, self._widest[b]) for b in blocks), default=0)
            backward += factor * (FP8_COMPILED if compiled else FP8_EAGER)
        widened = self._itemsize * max((sum(self._basis.packed[block]) for block in blocks), default=0)
        return max(again + backward + arriving + widened, self._loss() if end > self._head else 0)

    def _loss(self) -> int:
        """Return temporary bytes of the loss, beside the normalised hidden states."""
        shape = self._basis.shapes(self._head)[HEAD_WEIGHT]
        tokens = int(self._tokens * self._basis.workload.supervised)
        chunk = min(GPU_CHUNK if self._device.reserves else CPU_CHUNK, 4 * tokens * shape[0])
        copies = 1.0 + (0.5 if self._itemsize == 2 else 0.0)  # with their gradient in 16 bits
        if getattr(self._spec.config, "final_logit_softcapping", None):
            copies += 1
        copies += self._config.objective.logit_copies(self._device.reserves)
        summed = shape.numel() if HEAD_WEIGHT in self._basis.trained_names[self._head] else 0
        rounded = summed * self._itemsize if self._itemsize == 2 else 0  # when the backward pass hands it on
        chosen = self._spec.horizon * tokens * shape[1] * (self._itemsize + 4)  # hidden states and their gradients
        return max(int(chunk * copies), rounded) + 4 * summed + chosen

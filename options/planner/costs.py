"""Time of each layer for a micro-batch: a roofline, corrected by measurements.

A layer of each kind runs on fake tensors (`options.planner.layer_costs`), which gives its kernels; each takes the time
of its arithmetic or of its memory traffic, whichever is longer. A matrix product gets the share of the peak of large
products (`Device.products`), less where its result does not fill all cores with tiles: the last wave of them takes as
long as a full one. Attention gets `Device.attention` with long documents and less with short ones, and skips the half
of the pairs that a causal mask hides. All else goes at the memory's bandwidth. Where the host cannot launch kernels as
fast as they are done, the device waits for it.

Where rows pass in chunks, a micro-batch is all of its chunks: each kind of work takes as long as for whole rows, and at
least what so many rows of a chunk's length take; gradients are added up once a chunk.

The tower of images is a part of the first layer (`options.planner.tower`).

Recomputation adds a forward pass to the backward pass. Once a step the replicas sum their gradients and the optimizer
runs, in main memory where it is offloaded. Of gradients and activations that move while a layer is computed only what
takes longer than that counts. `options.planner.timing` measures single layers, `options.planner.feedback` whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from models.attention.positions import SLIDING, attention_kind
from models.family import HEAD_WEIGHT
from models.loss.lean import chunk_tokens
from options.planner import zero
from options.planner.communication import layer_messages
from options.planner.inputs import Basis, layer_kinds
from options.planner.layer_costs import LayerCase, LayerWork, Operation, product, work_of
from options.planner.measurements import TOWER
from options.planner.memory import StateBytes, kept_bytes, sent_bytes
from options.planner.tower import tower_work
from training.config.keys import TrainConfig
from training.config.precision import training_dtype
from training.metrics.devices import HOST_LINK, Device, this_device

TILE = 128  # rows and columns of the result that a core computes at a time (NVIDIA's guide to matrix multiplication)
PAIRS = 0.5  # of query and key, that a causal mask leaves
# Bytes read and written for each element.
LOGIT = 36  # from a logit to its gradient, in nine passes over fp32 (`models.loss.lean`)
ROUNDED = 6  # to give that gradient 16 bits
HEAD_GRADIENT = 14  # to scale the gradient of the head's weights, which is fp32, and round it
FP32_SUM = 10  # to add a 16-bit gradient to a sum in fp32 (`training.engine.gradients`)
PRODUCT_SUM = 6  # to let the gradient's product do it: the sum is read and written, and no 16-bit gradient is
UPDATE = 42  # a parameter in AdamW's step: 28 the update, 4 its clipped gradient, 6 the 16-bit weight, 4 the norm
CLIPPED = 4  # more in main memory, where clipping is a pass of its own
# To round an element of a product's factor to fp8, by pass. Compiled, as in torchao's own roofline
# (torchao.testing.training.roofline_utils, tensorwise): 2 read for the largest value; 2 read and 2 written, for both
# products that it is a factor of. Eager: absolute values, the largest; to fp32, scaled, clamped, to 8 bits.
CASTS_COMPILED = (1, 2)
CASTS_EAGER = (4, 2, 6, 8, 8, 5)
HOST = 2e10  # bytes/s of main memory for each process
SUM_CROSSES = max(1 / HOST_LINK, 2 / HOST)  # seconds for a byte of a sum, which is read there and written


@dataclass(frozen=True)
class Spent:
    """Seconds by kind of work."""

    products: float = 0.0  # matrix products of the blocks
    attention: float = 0.0  # attention kernels; where scores lie in memory they are products and traffic
    traffic: float = 0.0  # norms, rotary angles, activation functions and residuals; the embedding
    launches: float = 0.0  # the device waits for the host to launch kernels
    tower: float = 0.0  # the part of the first layer that sees images
    sums: float = 0.0  # gradients are added up over the micro-batches
    loss: float = 0.0  # the projection to the vocabulary and the cross-entropy, forward and backward
    optimizer: float = 0.0  # the gradient's norm and the optimizer's step
    replicas: float = 0.0  # replicas sum gradients and gather weights, with nothing to compute
    exchanges: float = 0.0  # heads for tokens, under sequence parallelism
    all_reduces: float = 0.0  # hidden states summed and gathered, under tensor parallelism
    offload: float = 0.0  # activations or sums of gradients go to main memory or come back, with nothing to compute

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def times(self, factor: float) -> Spent:
        return Spent(*(factor * value for value in vars(self).values()))

    def at_least(self, other: Spent) -> Spent:
        return Spent(*map(max, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Roofline:
    """A device that computes in `dtype`.

    Attributes:
        length: of a row, which was counted as one document; a window where that is shorter.
        document: mean length of a token's document; a window where that is shorter.
    """

    device: Device
    dtype: torch.dtype
    length: float
    document: float

    def seconds(self, operation: Operation) -> float:
        """Return the time of one kernel."""
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
        """Return the time of one pass through a layer."""
        seconds = dict.fromkeys(("products", "attention", "traffic"), 0.0)
        launches = 0.0
        for operation in operations:
            seconds[operation.kind] += self.seconds(operation)
            launches += self.device.launch
        return Spent(**seconds, launches=max(0.0, launches - sum(seconds.values())))

    def tower(self, operations: Sequence[Operation]) -> float:
        """Return the seconds of one pass through a tower, of whose attention no causal mask hides a part."""
        seconds = 0.0
        for each in operations:
            keys = each.shape[2]
            whole = replace(each, flops=each.flops / PAIRS) if each.kind == "attention" else each
            seconds += replace(self, length=keys, document=keys).seconds(whole)
        return max(seconds, len(operations) * self.device.launch)


@dataclass(frozen=True)
class LayerTime:
    """Time of a layer by kind of work."""

    forward: Spent  # for one micro-batch
    backward: Spent  # the same, recomputation included
    update: Spent  # once a step: the sum over the replicas and the optimizer

    def step(self, micro_batches: int) -> Spent:
        """Return the time of a whole step."""
        return (self.forward + self.backward).times(micro_batches) + self.update


def layer_times(basis: Basis) -> list[LayerTime]:
    """Return the times of all layers, the embedding first; on devices of several kinds that of the slowest for each."""
    if basis.device.each:
        of_kinds = [layer_times(replace(basis, device=kind)) for kind in basis.device.kinds]
        slowest = partial(max, key=lambda time: time.step(basis.micro_batches).total)
        return list(map(slowest, zip(*of_kinds, strict=True)))
    config, kinds, calibrated, work = basis.config, layer_kinds(basis.spec), basis.calibration, basis.share
    device = this_device() if calibrated else basis.device  # a calibration holds for the device that it was made on
    chunks = basis.row_chunks
    passes = {kind: _passes(basis, kind, device) for kind in set(kinds)}
    offloaded = kept_bytes(basis)[1] if config.offload_activations else [0] * len(kinds)

    sent = {}
    for kind in passes:
        sent[kind] = [Spent(**message.seconds(basis)) for message in layer_messages(basis, kind)]
    update = (calibrated.update if calibrated else 1.0) * update_time(config, device)
    update /= config.model_topo.replicas if config.zero_optimization.stage else 1

    times = []
    for number, kind in enumerate(kinds):
        weights = basis.trained[number]
        forward, backward = passes[kind]
        backward += Spent(sums=chunks * weights * _sum_bytes(basis, number, device) / device.bandwidth)
        if calibrated:
            factors = calibrated.layers[str(kind)]
            forward, backward = forward.times(factors[0]), backward.times(factors[1])
        if number == 0:
            seen = tower_passes(basis, device)
            forward, backward = forward + seen[0], backward + seen[1]
        forward, backward = forward + sent[kind][0], backward + sent[kind][1]

        if basis.measured:
            factor = basis.measured.layers[number]
            forward, backward = forward.times(factor), backward.times(factor)
        if number in basis.recomputed:
            backward += forward

        # What goes on beside the computing: sums of the replicas, and copies from and to host memory.
        early = config.sums_while_computing and basis.in_stages  # without stages DeepSpeed sums, afterwards
        hidden = backward.total if early and device.reserves else 0.0
        summed = _sum_time(config, basis.sums_bandwidth, weights, hidden, early)
        once = Spent(optimizer=weights * update, replicas=summed)

        moved = offloaded[number] * work.length / work.longest / HOST_LINK
        crosses = SUM_CROSSES if config.offload_gradients and device.reserves else 0.0
        forward += Spent(offload=max(0.0, moved - forward.total))
        backward += Spent(
            offload=max(0.0, moved + chunks * weights * StateBytes.of(config).sum * crosses - backward.total)
        )

        gathered, reduced = zero.seconds(basis, number, sent_bytes(config))
        forward, backward = forward + Spent(replicas=gathered), backward + Spent(replicas=chunks * reduced)
        times.append(LayerTime(forward, backward, once))
    return times


def times_of_stages(basis: Basis) -> list[list[LayerTime]]:
    """Return for each stage the times that all layers would take on its devices."""
    times = {device: layer_times(replace(basis, device=device)) for device in set(basis.of_stages)}
    return list(map(times.__getitem__, basis.of_stages))


def _sum_bytes(basis: Basis, layer: int, device: Device) -> int:
    """Return bytes read and written to add up the gradient of one parameter of a layer in a micro-batch."""
    config, itemsize = basis.config, training_dtype(basis.config).itemsize
    if StateBytes.of(config).sum <= itemsize:
        return 3 * itemsize
    put_off = config.v_schedule and device.ampere and not basis.spec.has_experts  # experts are no linear layers
    by_product = put_off and not config.zero_optimization.offloads and 0 < layer < basis.spec.n_layers - 1
    return PRODUCT_SUM if by_product else FP32_SUM


def _sum_time(config: TrainConfig, bandwidth: float, weights: int, hidden: float, early: bool) -> float:
    """Return seconds at the end of a step in which replicas sum gradients and gather weights, with nothing to compute.

    In a ring, an all-reduce takes each byte twice over a link, a reduce once, and an all-gather of the weights once.

    Args:
        bandwidth: bytes/s that a process sends.
        hidden: seconds of computation meanwhile; none where the cores that compute also send.
        early: whether gradients are reduced during the backward pass.
    """
    others, stage = 1 - 1 / config.model_topo.replicas, config.zero_optimization.stage
    summed = sent_bytes(config) * (1 if early else 2 * others) / bandwidth
    gathered = others * training_dtype(config).itemsize / bandwidth if stage < 3 else 0.0
    return weights * gathered + (max(0.0, weights * summed - hidden) if stage < 2 else 0.0)


def update_time(config: TrainConfig, device: Device) -> float:
    """Return the optimizer's seconds for a parameter, before it is sharded over the replicas."""
    if not config.zero_optimization.offloads:
        return UPDATE / device.bandwidth
    states = StateBytes.of(config)
    moved = states.sum * (2 if config.offload_gradients else 1) + training_dtype(config).itemsize
    return (UPDATE + CLIPPED - states.spared) / HOST + moved / HOST_LINK


def _passes(basis: Basis, layer: int, device: Device) -> tuple[Spent, Spent]:
    """Estimate the forward and backward pass of a layer for one micro-batch, without adding up gradients."""
    if (chunks := basis.row_chunks) > 1:
        whole, chunk = basis.in_chunks_of(None), replace(basis.workload, length=basis.workload.length / chunks)
        forward, backward = _passes(whole, layer, device)
        alone = _passes(replace(whole, workload=chunk), layer, device)
        return forward.at_least(alone[0].times(chunks)), backward.at_least(alone[1].times(chunks))
    spec, dtype = basis.spec, training_dtype(basis.config)
    roofline = _roofline(basis, layer, dtype, device)
    counted = _layer_work(basis, layer, dtype, device)
    forward, backward = roofline.pass_of(counted.forward), roofline.pass_of(counted.backward)
    if layer == spec.n_layers - 1:
        forward += Spent(loss=sum(roofline.seconds(each) for each in loss_work(basis, dtype, device)))
        head = basis.shapes(layer)[HEAD_WEIGHT].numel() if HEAD_WEIGHT in basis.trained_names[layer] else 0
        backward += Spent(loss=head * HEAD_GRADIENT / device.bandwidth)
    return forward, backward


def _roofline(basis: Basis, layer: int, dtype: torch.dtype, device: Device) -> Roofline:
    spec, work = basis.spec, basis.share
    slides = 0 < layer < spec.n_layers - 1 and attention_kind(spec.config, layer - 1) == SLIDING
    window = spec.config.sliding_window if slides else math.inf
    return Roofline(device, dtype, min(math.ceil(work.length), window), min(work.attended, window))


def tower_passes(basis: Basis, device: Device) -> tuple[Spent, Spent]:
    """Estimate the forward and backward pass of the tower for the images of a micro-batch, if there are any."""
    if not (basis.spec.family.sees and basis.share.images.number):
        return Spent(), Spent()
    measured = basis.calibration.layers if basis.calibration else {}
    factors = measured.get(TOWER) or measured.get("1", (1.0, 1.0))  # or a block's, if no image was there to be timed
    work, times = tower_work(basis)
    roofline = Roofline(device, training_dtype(basis.config), 1, 1)
    passes = [roofline.tower(operations) for operations in (work.forward, work.backward)]
    forward, backward = (factor * times * seconds for factor, seconds in zip(factors, passes, strict=True))
    return Spent(tower=forward), Spent(tower=backward)


def _layer_work(basis: Basis, layer: int, dtype: torch.dtype, device: Device) -> LayerWork:
    config, work = basis.config, basis.share
    flash, compiled = config.has_flash(device.ampere), config.compiles(device.ampere, basis.spec.has_experts)
    case = LayerCase(layer, work.rows, math.ceil(work.length), dtype, flash, config.model_topo.tensor)
    found = basis.once(work_of, case, compiled)
    is_block = 0 < layer < basis.spec.n_layers - 1
    if not (is_block and basis.in_fp8):
        return found
    rounded = basis.config.weights_on_host
    return LayerWork(*(tuple(in_fp8(each, compiled, rounded)) for each in (found.forward, found.backward)))


def share_of_product(basis: Basis, layer: int, sizes: tuple[int, int] | None = None) -> float:
    """Return which part of a block's forward pass a product takes.

    Args:
        sizes: numbers of a token that it takes and makes; without, it is the block's last product.
    """
    device, dtype = basis.device, training_dtype(basis.config)
    roofline = _roofline(basis, layer, dtype, device)
    work = _layer_work(basis, layer, dtype, device).forward
    products = [each for each in work if each.kind == "products" and sizes in (None, (each.inner, each.shape[2]))]
    return roofline.seconds(products[-1]) / roofline.pass_of(work).total


def in_fp8(operations: Iterable[Operation], compiled: bool, rounded: bool = False) -> Iterator[Operation]:
    """Yield a block's operations, linear layers' products in fp8, after the passes that round their factors.

    Args:
        rounded: whether weights are before, once for all micro-batches.
    """
    for operation in operations:
        at_a_time, rows, columns = operation.shape
        if operation.kind != "products" or at_a_time > 1:  # several at a time are those of attention
            yield operation
            continue
        inner = operation.inner
        factors = [rows * inner, inner * columns]  # of which a weight is the second
        for elements in factors[:1] if rounded and operation.weighs else factors:
            for size in CASTS_COMPILED if compiled else CASTS_EAGER:
                yield Operation("traffic", {0: elements * size}, {})
        yield replace(operation, reads={0: rows * inner + inner * columns}, fp8=True)


def loss_work(basis: Basis, dtype: torch.dtype, device: Device) -> list[Operation]:
    """Return the kernels of a micro-batch's loss and its gradients, chunk by chunk (`models.loss.lean`)."""
    work, itemsize = basis.share, dtype.itemsize
    words, hidden = basis.shapes(basis.spec.n_layers - 1)[HEAD_WEIGHT]
    tokens = work.micro_tokens * work.supervised * basis.spec.horizon
    chunks = max(1, math.ceil(tokens / chunk_tokens(words, not device.reserves)))
    rows = max(1, math.ceil(tokens / chunks))
    chunk = [
        product(rows, hidden, words, itemsize, 4),
        product(rows, words, hidden, itemsize, 4),
        product(words, rows, hidden, itemsize, 8),  # added to that of the chunks before
    ]
    passes = rows * words * (LOGIT + (ROUNDED if itemsize < 4 else 0))
    return chunks * [*chunk, Operation("traffic", {0: passes}, {})]

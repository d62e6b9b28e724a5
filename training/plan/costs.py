"""How long each layer takes for a micro-batch: estimated from what it does, and corrected by what was measured
of single layers (`training.plan.calibration`) and of the run's own steps (`training.plan.feedback`).

What a layer does is found by running one of its kind on fake tensors (`models.costs`), and how long that
takes is a roofline (`training.plan.roofline`): FLOPs, bytes and launches, each kernel by itself. Recomputed activations
add a forward pass to the backward pass. Gradients are added up in every micro-batch, the dense one of the embedding
included, which is what a large vocabulary costs the first stage; the last one takes the logits through the softmax to
their gradient. Processes that share rows or layers wait for each other's messages (`training.plan.sharing`). Once a
step the replicas sum their gradients and the optimizer does its work, in main memory where it is offloaded. Of what is
moved while a layer is computed, gradients and offloaded activations, counts what takes longer than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from models.attention.positions import SLIDING, attention_kind
from models.costs import LayerCase, LayerWork, Operation, Saved, product, saved_by, work_of
from models.lean_loss import chunk_tokens
from models.spec import ModelSpec
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.metrics.devices import HOST_LINK, Device, this_device
from training.plan.basis import Basis
from training.plan.casts import in_fp8
from training.plan.optimizer_memory import StateBytes, sent_bytes
from training.plan.roofline import Roofline, Spent
from training.plan.sharing import messages

# Bytes that are read and written for each of what is counted.
LOGIT = 36  # from a logit to its gradient, in nine passes over fp32 (`models.lean_loss`)
ROUNDED = 6  # to give that gradient 16 bits
HEAD_GRADIENT = 14  # to scale the gradient of the head's weights, which is fp32, and round it
FP32_SUM = 10  # to add a 16-bit gradient to a sum in fp32 (`training.engine.gradient_sums`)
PRODUCT_SUM = 6  # to let the gradient's product do it: the sum is read and written, and no 16-bit gradient is
UPDATE = 42  # a parameter in AdamW's step: 28 the update, 4 its clipped gradient, 6 the 16-bit weight, 4 the norm
CLIPPED = 4  # more in main memory, where clipping is a pass of its own
HOST = 2e10  # bytes/s of main memory for each process


@dataclass(frozen=True)
class LayerTime:
    """What a layer's time is made of.

    Attributes:
        forward, backward: for one micro-batch; backward includes what is recomputed.
        update: once a step: of the sum over the replicas and the optimizer.
    """

    forward: Spent
    backward: Spent
    update: Spent

    def of_step(self, micro_batches: int) -> Spent:
        """Of a whole step."""
        return (self.forward + self.backward).times(micro_batches) + self.update


def layer_times(basis: Basis) -> list[LayerTime]:
    """The times of all layers, the embedding first."""
    config, spec, calibrated, work = basis.config, basis.spec, basis.calibration, basis.share
    device = this_device() if calibrated else basis.device  # a calibration speaks of the device that it was measured on
    away, passes = sent_away(basis), {kind: _passes(basis, kind, device) for kind in set(kinds(spec))}
    sent = {kind: [each.spent(basis) for each in messages(basis, kind)] for kind in passes}
    update = (calibrated.update if calibrated else 1.0) * update_time(config, device)
    update /= config.model_topo.replicas if config.zero_optimization.stage else 1
    times = []
    for number, kind in enumerate(kinds(spec)):
        weights = basis.parameters[number]
        forward, backward = passes[kind]
        backward += Spent(sums=weights * _sum_bytes(basis, number, device) / device.bandwidth)
        if calibrated:
            factors = calibrated.layers[str(kind)]
            forward, backward = forward.times(factors[0]), backward.times(factors[1])
        forward, backward = forward + sent[kind][0], backward + sent[kind][1]
        if basis.measured:
            factor = basis.measured.layers[number]
            forward, backward = forward.times(factor), backward.times(factor)
        if number in basis.recomputed:
            backward += forward
        hidden = backward.total if config.sums_while_computing and device.reserves else 0.0
        once = Spent(optimizer=weights * update, replicas=_shared(config, basis.sums_bandwidth, weights, hidden))
        moved = away[number] * work.length / work.longest / HOST_LINK
        forward += Spent(offload=max(0.0, moved - forward.total))
        backward += Spent(offload=max(0.0, moved - backward.total))
        times.append(LayerTime(forward, backward, once))
    return times


def _sum_bytes(basis: Basis, layer: int, device: Device) -> int:
    """Bytes that are read and written to add up the gradient of one of a layer's parameters in a micro-batch."""
    config, itemsize = basis.config, training_dtype(basis.config).itemsize
    if StateBytes.of(config).gradient <= itemsize:
        return 3 * itemsize
    put_off = config.v_schedule and device.ampere and not basis.spec.has_experts  # experts are no linear layers
    by_product = put_off and not config.zero_optimization.offloads and 0 < layer < basis.spec.n_layers - 1
    return PRODUCT_SUM if by_product else FP32_SUM


def _shared(config: TrainConfig, bandwidth: float, weights: int, hidden: float) -> float:
    """Seconds in which replicas sum the gradients of so many weights and hand these round, with nothing to compute.

    In a ring, an all-reduce takes each byte twice over a link, a reduce once, and an all-gather of the weights once.

    Args:
        bandwidth: bytes/s that a process sends.
        hidden: seconds in which something else is computed meanwhile; none where the cores that compute also send.
    """
    others, early = 1 - 1 / config.model_topo.replicas, config.sums_while_computing
    summed = sent_bytes(config) * (1 if early else 2 * others) / bandwidth
    handed_round = others * training_dtype(config).itemsize / bandwidth
    return weights * handed_round + max(0.0, weights * summed - hidden)


def sent_away(basis: Basis) -> list[int]:
    """Bytes of a micro-batch that each layer sends to main memory where activations are offloaded."""
    blocks = range(1, basis.spec.n_layers - 1)
    if not (basis.config.offload_activations and basis.device.reserves):
        return [0] * basis.spec.n_layers
    kept = kept_without_offload(basis)
    return [kept[layer] if layer in blocks else 0 for layer in range(basis.spec.n_layers)]


def kept_without_offload(basis: Basis) -> list[int]:
    """Bytes of a micro-batch that each layer keeps for its backward pass: its input alone where it recomputes."""
    work = basis.share
    hidden = work.rows * work.longest * basis.spec.config.hidden_size * training_dtype(basis.config).itemsize
    return [hidden if layer in basis.recomputed else each.inside for layer, each in enumerate(saved(basis))]


def saved(basis: Basis) -> list[Saved]:
    """What each layer keeps without recomputation."""
    work, flash = basis.share, basis.config.has_flash(basis.device.ampere)
    case = work.rows, work.longest, training_dtype(basis.config), flash, basis.config.model_topo.tensor
    return [basis.once(saved_by, LayerCase(kind, *case)) for kind in kinds(basis.spec)]


def update_time(config: TrainConfig, device: Device) -> float:
    """Seconds of the optimizer for a parameter, before it is sharded over the replicas."""
    if not config.zero_optimization.offloads:
        return UPDATE / device.bandwidth
    moved = StateBytes.of(config).gradient + training_dtype(config).itemsize
    return (UPDATE + CLIPPED) / HOST + moved / HOST_LINK


def kinds(spec: ModelSpec) -> list[int]:
    """For each layer the first one that is like it: the same weights and the same kind of attention."""
    first: dict[object, int] = {}
    alike = []
    for number in range(spec.n_layers):
        is_block = 0 < number < spec.n_layers - 1
        kind = attention_kind(spec.config, number - 1) if is_block else number
        alike.append(first.setdefault((kind, tuple(spec.shapes(number).items())), number))
    return alike


def _passes(basis: Basis, layer: int, device: Device) -> tuple[Spent, Spent]:
    """The forward and the backward pass of a layer for one micro-batch, gradients not yet added up."""
    spec, work, dtype = basis.spec, basis.share, training_dtype(basis.config)
    is_block = 0 < layer < spec.n_layers - 1
    slides = is_block and attention_kind(spec.config, layer - 1) == SLIDING
    window = spec.config.sliding_window if slides else math.inf
    roofline = Roofline(device, dtype, min(math.ceil(work.length), window), min(work.attended, window))
    counted = _counted(basis, layer, dtype, device)
    forward, backward = roofline.pass_of(counted.forward), roofline.pass_of(counted.backward)
    if layer == spec.n_layers - 1:
        forward += Spent(loss=sum(roofline.seconds(each) for each in loss_work(basis, dtype, device)))
        head = basis.shapes(layer)[spec.family.tie.head].numel()
        backward += Spent(loss=head * HEAD_GRADIENT / device.bandwidth)
    return forward, backward


def _counted(basis: Basis, layer: int, dtype: torch.dtype, device: Device) -> LayerWork:
    """What a layer does."""
    config, work = basis.config, basis.share
    flash, compiled = config.has_flash(device.ampere), config.compiles(device.ampere, basis.spec.has_experts)
    case = LayerCase(layer, work.rows, math.ceil(work.length), dtype, flash, config.model_topo.tensor)
    found = basis.once(work_of, case, compiled)
    is_block = 0 < layer < basis.spec.n_layers - 1
    return in_fp8(found, compiled) if is_block and basis.in_fp8 else found


def loss_work(basis: Basis, dtype: torch.dtype, device: Device) -> list[Operation]:
    """What the loss of a micro-batch does, which takes its gradients along, chunk by chunk (`models.lean_loss`)."""
    work, itemsize = basis.share, dtype.itemsize
    words, hidden = basis.shapes(basis.spec.n_layers - 1)[basis.spec.family.tie.head]
    tokens = work.micro_tokens * work.supervised
    chunks = max(1, math.ceil(tokens / chunk_tokens(words, not device.reserves)))
    rows = max(1, math.ceil(tokens / chunks))
    chunk = [
        product(rows, hidden, words, itemsize, 4),
        product(rows, words, hidden, itemsize, 4),
        product(words, rows, hidden, itemsize, 8),  # added to what the chunks before gave
    ]
    passes = rows * words * (LOGIT + (ROUNDED if itemsize < 4 else 0))
    return chunks * [*chunk, Operation("traffic", {0: passes}, {})]

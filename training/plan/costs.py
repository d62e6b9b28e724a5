"""How long each layer takes for a micro-batch: estimated from shapes, and corrected by what was measured
(`training.plan.calibration`).

A layer's products take 2 FLOPs a weight and token forward and twice that backward; attention adds 4 x heads x head_dim
for each pair of query and key (`models.flops`). Of stacked experts those count that a token is sent to, of
the head the supervised tokens, and of the embedding nothing. Recomputed activations add a forward pass to the backward
pass. Memory traffic comes on top: weights are read, and gradients are written and added up in every micro-batch, the
dense one of the embedding included, which is what a large vocabulary costs the first stage; the last one takes the
logits through the softmax to their gradient. Once a step the replicas sum their gradients and the optimizer does its
work, in main memory where it is offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.flops import ModelFlops
from models.positions import attention_kind
from models.spec import ModelSpec
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.metrics.devices import Device, this_device
from training.plan.basis import Basis, Workload
from training.plan.optimizer_memory import StateBytes

GRADIENT = 12  # bytes that are read and written to add a gradient to the sum in fp32
LOGIT = 36  # bytes that are read and written from a logit to its gradient, in nine passes (`models.lean_loss`)
HOST = 2e10  # bytes/s of main memory for each process
UPDATE = 40  # bytes that an optimizer reads and writes for a parameter, about: weights, gradient, two states


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer.

    Attributes:
        forward, backward: for one micro-batch; backward includes what is recomputed.
        update: once a step: of the sum over the replicas and the optimizer.
    """

    forward: float
    backward: float
    update: float

    def of_step(self, micro_batches: int) -> float:
        """Seconds in a whole step."""
        return micro_batches * (self.forward + self.backward) + self.update


def layer_times(basis: Basis) -> list[LayerTime]:
    """The times of all layers, the embedding first."""
    config, spec, work = basis.config, basis.spec, basis.workload
    measured = basis.calibration
    device = this_device() if measured else basis.device  # a calibration speaks of the device that it was measured on
    dtype = training_dtype(config)
    # A ring all-reduce of the gradients and an all-gather of the weights.
    sent = (1 - 1 / config.model_topo.replicas) * (2 * StateBytes.of(config).gradient + dtype.itemsize)
    sharing = config.model_topo.replicas if config.zero_optimization.stage else 1
    update = sent / device.link + (measured.update if measured else 1.0) * update_time(config, device) / sharing
    times = []
    for number, (kind, flops) in enumerate(zip(kinds(spec), _forward_flops(spec, work), strict=True)):
        product = flops / device.flops(dtype)
        weights = sum(shape.numel() for shape in spec.shapes(number).values())
        backward = weights * (dtype.itemsize + GRADIENT) / device.bandwidth
        if number == spec.n_layers - 1:  # the loss takes the gradients along (models.lean_loss)
            logits = work.micro_tokens * work.supervised * spec.config.vocab_size
            forward = 3 * product + logits * LOGIT / device.bandwidth
        else:
            read = weights if number else 2 * work.micro_tokens * spec.config.hidden_size
            forward = product + read * dtype.itemsize / device.bandwidth
            backward += 2 * product
        slower = measured.layers[str(kind)] if measured else (1.0, 1.0)
        forward *= slower[0]
        again = forward if number in basis.recomputed else 0.0
        times.append(LayerTime(forward, backward * slower[1] + again, weights * update))
    return times


def update_time(config: TrainConfig, device: Device) -> float:
    """Seconds of the optimizer for a parameter, before it is sharded over the replicas."""
    if not config.zero_optimization.offloads:
        return UPDATE / device.bandwidth
    moved = StateBytes.of(config).gradient + training_dtype(config).itemsize
    return UPDATE / HOST + moved / device.link


def kinds(spec: ModelSpec) -> list[int]:
    """For each layer the first one that is like it: the same weights and the same kind of attention."""
    first: dict[object, int] = {}
    alike = []
    for number in range(spec.n_layers):
        is_block = 0 < number < spec.n_layers - 1
        kind = attention_kind(spec.config, number - 1) if is_block else number
        alike.append(first.setdefault((kind, tuple(spec.shapes(number).items())), number))
    return alike


def _forward_flops(spec: ModelSpec, work: Workload) -> list[float]:
    """FLOPs of each layer's forward pass for one micro-batch."""
    document = max(1, round(work.attended))
    of_one = ModelFlops(spec).by_layer([document], 1)
    *layers, head = (flops / 3 for flops in of_one)  # forward, and twice that backward
    return [*(flops * work.micro_tokens / document for flops in layers), head * work.micro_tokens * work.supervised]

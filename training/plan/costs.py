"""How long each layer takes for a micro-batch: estimated from shapes, and corrected by what was measured
(`training.plan.calibration`).

A layer's products take 2 FLOPs a weight and token forward and twice that backward; attention adds 4 x heads x head_dim
for each pair of query and key (`training.metrics.flops`). Of stacked experts those count that a token is sent to, of
the head the supervised tokens, and of the embedding nothing. Recomputed activations add a forward pass to the backward
pass. Memory traffic comes on top: weights are read, and gradients are written and added up in every micro-batch, the
dense one of the embedding included, which is what a large vocabulary costs the first stage; the last one takes the
logits through the softmax to their gradient. Once a step the replicas sum their gradients and the optimizer does its
work, in main memory where it is offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from models.positions import attention_kind
from models.spec import ModelSpec
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.metrics.devices import Device
from training.metrics.flops import ModelFlops
from training.plan.optimizer_memory import StateBytes
from training.plan.workload import Workload

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


@dataclass(frozen=True)
class Factors:
    """How many times as long as estimated things take on a device.

    Attributes:
        layers: forward and backward, by the number of the first layer of each kind.
        update: the optimizer's work.
    """

    layers: dict[str, tuple[float, float]] = field(default_factory=dict)
    update: float = 1.0


@dataclass(frozen=True)
class LayerTimes:
    """The times of a model's layers.

    Args:
        device: that they run on.
        recompute: the layers that do.
        factors: by which estimates are corrected.
    """

    spec: ModelSpec
    config: TrainConfig
    workload: Workload
    device: Device
    recompute: frozenset[int] = frozenset()
    factors: Factors = Factors()

    @cached_property
    def dtype(self) -> torch.dtype:
        return training_dtype(self.config)

    def layer(self, number: int) -> LayerTime:
        """Of layer `number`, from 0, the embedding."""
        work, size, bandwidth = self.workload, self.dtype.itemsize, self.device.bandwidth
        product = self._flops[number] / self.device.flops(self.dtype)
        weights = sum(shape.numel() for shape in self.spec.shapes(number).values())
        backward = weights * (size + GRADIENT) / bandwidth
        if number == self.spec.n_layers - 1:  # the loss takes the gradients along (models.lean_loss)
            logits = work.micro_tokens * work.supervised * self.spec.config.vocab_size
            forward = 3 * product + logits * LOGIT / bandwidth
        else:
            read = weights if number else 2 * work.micro_tokens * self.spec.config.hidden_size
            forward, backward = product + read * size / bandwidth, backward + 2 * product
        slower = self.factors.layers.get(str(self._kinds[number]), (1.0, 1.0))
        forward, backward = forward * slower[0], backward * slower[1]
        again = forward if number in self.recompute else 0.0
        return LayerTime(forward, backward + again, weights * (self._summing + self.factors.update * self.update))

    @cached_property
    def update(self) -> float:
        """Seconds a parameter of the optimizer, which is sharded over the replicas."""
        config, device = self.config, self.device
        replicas = config.model_topo.replicas if config.zero_optimization.stage else 1
        if not config.zero_optimization.offloads:
            return UPDATE / replicas / device.bandwidth
        moved = StateBytes.of(config).gradient + self.dtype.itemsize
        return (UPDATE / HOST + moved / device.link) / replicas

    @cached_property
    def _summing(self) -> float:
        """Seconds a parameter of a ring all-reduce of the gradients and an all-gather of the weights."""
        others = 1 - 1 / self.config.model_topo.replicas
        return others * (2 * StateBytes.of(self.config).gradient + self.dtype.itemsize) / self.device.link

    @cached_property
    def _kinds(self) -> list[int]:
        return kinds(self.spec)

    @cached_property
    def _flops(self) -> list[float]:
        """FLOPs of each layer's forward pass for one micro-batch."""
        work = self.workload
        document = max(1, round(work.attended))
        of_one = ModelFlops(self.spec).by_layer([document], 1)
        *layers, head = (flops / 3 for flops in of_one)  # forward, and twice that backward
        return [*(flops * work.micro_tokens / document for flops in layers), head * work.micro_tokens * work.supervised]


def kinds(spec: ModelSpec) -> list[int]:
    """For each layer the first one that is like it: the same weights and the same kind of attention."""
    first: dict[object, int] = {}
    alike = []
    for number in range(spec.n_layers):
        is_block = 0 < number < spec.n_layers - 1
        kind = attention_kind(spec.config, number - 1) if is_block else number
        alike.append(first.setdefault((kind, tuple(spec.shapes(number).items())), number))
    return alike

"""How long each layer takes for a micro-batch: estimated from shapes, or measured (`training.plan.calibration`).

A layer's products take 2 FLOPs a weight and token forward and twice that backward; attention adds 4 x heads x head_dim
for each pair of query and key (`training.metrics.flops`). Of stacked experts those count that a token is sent to, of
the head the supervised tokens, and of the embedding nothing. Recomputed activations add a forward pass to the backward
pass. Memory traffic comes on top: weights are read, and gradients are written and added up in every micro-batch, the
dense one of the embedding included, which is what a large vocabulary costs the first stage; the last one takes the
logits through the softmax to their gradient. Once a step the replicas sum their gradients and the optimizer does its
work, in main memory where it is offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from models.positions import attention_kind
from models.spec import ModelSpec
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.metrics.flops import layer_flops
from training.plan.devices import Device
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


class Times(Protocol):
    """Knows how long each layer takes."""

    def layer(self, number: int) -> LayerTime: ...


@dataclass(frozen=True)
class Estimate:
    """The times of a model's layers by their shapes.

    Args:
        device: that they run on.
        recompute: the layers that do.
    """

    spec: ModelSpec
    config: TrainConfig
    workload: Workload
    device: Device
    recompute: frozenset[int]

    @cached_property
    def dtype(self) -> torch.dtype:
        return training_dtype(self.config)

    def layer(self, number: int) -> LayerTime:
        """Of layer `number`, from 0, the embedding."""
        product = self.flops(number) / self.device.flops(self.dtype)
        weights = self.weights(number)
        bandwidth = self.device.bandwidth
        written = weights * (self.dtype.itemsize + GRADIENT) / bandwidth
        update = weights * self.update
        if number == self.spec.n_layers - 1:  # the loss takes the gradients along (models.lean_loss)
            logits = self.workload.micro_tokens * self.workload.supervised * self.spec.config.vocab_size
            return LayerTime(3 * product + logits * LOGIT / bandwidth, written, update)
        forward = product + (weights * self.dtype.itemsize / bandwidth if number else 0.0)
        again = forward if number in self.recompute else 0.0
        return LayerTime(forward, 2 * product + written + again, update)

    @cached_property
    def update(self) -> float:
        """Seconds a parameter of the sum over the replicas and the optimizer."""
        config, device = self.config, self.device
        if not config.zero_optimization.offloads:
            return self.summing + UPDATE / self.replicas / device.bandwidth
        moved = StateBytes.of(config).gradient + self.dtype.itemsize
        return self.summing + (UPDATE / HOST + moved / device.link) / self.replicas

    @cached_property
    def summing(self) -> float:
        """Seconds a parameter of a ring all-reduce of the gradients and an all-gather of the weights."""
        others = 1 - 1 / self.config.model_topo.replicas
        return others * (2 * StateBytes.of(self.config).gradient + self.dtype.itemsize) / self.device.link

    def weights(self, number: int) -> int:
        """Parameters of a layer."""
        return sum(shape.numel() for shape in self.spec.shapes(number).values())

    @property
    def replicas(self) -> int:
        """Over which the optimizer is sharded."""
        return self.config.model_topo.replicas if self.config.zero_optimization.stage else 1

    def flops(self, number: int) -> float:
        """FLOPs of a layer's forward pass for one micro-batch."""
        return self._flops[number]

    @cached_property
    def _flops(self) -> list[float]:
        work = self.workload
        document = max(1, round(work.attended))
        of_one = layer_flops(self.spec, [document], 1)
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

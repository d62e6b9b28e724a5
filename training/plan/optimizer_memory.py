"""How many bytes a parameter takes: weight, gradient, master weight, optimizer states, and what a step needs besides.

What DeepSpeed 0.19.8 really holds, which is more than the textbook's 16 bytes (`runtime/bf16_optimizer.py` and
`runtime/zero/stage_1_and_2.py` there):

    fp32, stage 0      weight 4, gradient 4, states
    fp32, stage 1      the same; a copy of the weights, sharded over the replicas as the states are; and in the step a
                       copy of the gradients, or before it a bucket that they are summed in
    fp16, stage 1      weight 2, gradient 2, master weight 4 and states, sharded; in the step the sharded gradient in
                       fp16 and in fp32, or before it the bucket
    bf16, stage 1      weight 2, gradient 4 (sums are fp32), master weight 4 and states, sharded
    bf16, stage 0      weight 2, gradient 2, master weight 4 and states, sharded all the same; in the step the sharded
                       gradient in fp32
    offloaded          weight and gradient stay; master weight, states and a copy of the gradient lie in main memory

States: 8 bytes for Adam and AdamW, 4 for Lion and for SGD with momentum, a row and a column a matrix for Adafactor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.config.sections import Optimizer
from training.optimizer.optimizers import PIECE

BUCKET = 500_000_000  # elements; DeepSpeed's default `reduce_bucket_size`


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter, on the device unless stated otherwise.

    Attributes:
        weight: in the dtype that the run computes in.
        gradient: from the first backward pass to the step.
        optimizer: master weight and states.
        step: on top of these, while the optimizer works: copies of the gradient.
        working: what an update takes for itself, for each of at most `working_size` elements.
        host: in main memory.
        bucket: bytes of an element of the buffer in which gradients are summed before the step; 0 where there is none.
        bucket_size: elements of that buffer.
    """

    weight: float
    gradient: float
    optimizer: float
    step: float
    working: float
    working_size: int
    host: float
    bucket: float
    bucket_size: int

    @classmethod
    def of(cls, config: TrainConfig) -> StateBytes:
        dtype, stage = training_dtype(config), config.zero_optimization.stage
        weight = float(dtype.itemsize)
        replicas = config.model_topo.replicas
        states, (working, piece) = _states(config.optimizer), _working(config.optimizer)
        more = config.zero_optimization.model_extra or {}
        size = int(more.get("reduce_bucket_size", BUCKET))
        if stage == 0 and dtype == torch.float32:
            return cls(weight, 4.0, states, 0.0, working, piece, 0.0, 0.0, size)
        summed = (config.data_types or {}).get("grad_accum_dtype", "fp32")
        gradient = weight if dtype != torch.bfloat16 or stage == 0 or summed != "fp32" else 4.0
        if config.zero_optimization.offloads:
            return cls(weight, gradient, 0.0, 0.0, 0.0, 0, (4 + states + 4 + weight) / replicas, weight, size)
        optimizer = (4 + states) / replicas
        if dtype == torch.bfloat16 and (stage == 0 or gradient == 4.0):
            copied = 0.0 if gradient == 4.0 else 4.0
            return cls(weight, gradient, optimizer, copied / replicas, working, piece, 0.0, 0.0, size)
        copies = 4.0 if weight == 4 else weight + 4.0
        return cls(weight, gradient, optimizer, copies / replicas, working, piece, 0.0, weight, size)


def _states(optimizer: Optimizer) -> float:
    """Bytes that an optimizer keeps for a parameter."""
    momentum = 4.0 if optimizer.params.get("momentum") else 0.0
    return {"AdamW": 8.0, "Adam": 8.0, "Lion": 4.0, "Adafactor": 0.0, "SGD": momentum}[optimizer.type]


def _working(optimizer: Optimizer) -> tuple[float, int]:
    """Bytes that an update takes for itself, for each of so many elements at most."""
    if optimizer.type == "Lion":
        return 8.0, PIECE
    return (4.0, 2**62) if optimizer.type == "SGD" and optimizer.params.get("weight_decay") else (0.0, 0)

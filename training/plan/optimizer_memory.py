"""How many bytes a parameter takes: weight, gradient, master weight, optimizer states, and what a step needs besides.

What DeepSpeed 0.19.8 really holds, which is more than the textbook's 16 bytes (`runtime/bf16_optimizer.py` and
`runtime/zero/stage_1_and_2.py` there). Master weights and states are sharded over the replicas, in bf16 at stage 0 too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig

BUCKET = 500_000_000  # elements; DeepSpeed's default `reduce_bucket_size`


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter, on the device unless stated otherwise.

    Attributes:
        weight: in the dtype that the run computes in.
        gradient: from the first backward pass to the step.
        optimizer: master weight and states.
        bucket_size: elements of the buffer in which gradients are summed before the step.
        working: what Lion's update takes for itself, of a piece at a time.
        step: on top of these, while the optimizer works: copies of the gradient, with SGD's decay added.
        host: in main memory.
        bucket: bytes of an element of the buffer; 0 where there is none.
    """

    weight: float
    gradient: float
    optimizer: float
    bucket_size: int
    working: float = 0.0
    step: float = 0.0
    host: float = 0.0
    bucket: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig) -> StateBytes:
        dtype, zero = training_dtype(config), config.zero_optimization
        weight, replicas = float(dtype.itemsize), config.model_topo.replicas
        summed = config.data_types.grad_accum_dtype if config.data_types else "fp32"
        gradient = weight if dtype != torch.bfloat16 or zero.stage == 0 or summed != "fp32" else 4.0
        optimizer = config.optimizer.type
        momentum = 4.0 if config.optimizer.params.get("momentum") else 0.0
        # Adafactor's rows and columns are about a thousandth of the weights.
        states = {"AdamW": 8.0, "Adam": 8.0, "Lion": 4.0, "Adafactor": 0.0, "SGD": momentum}[optimizer]
        size = int((zero.model_extra or {}).get("reduce_bucket_size", BUCKET))
        decayed = 4.0 if optimizer == "SGD" and config.optimizer.params.get("weight_decay") else 0.0
        working = 8.0 if optimizer == "Lion" else 0.0
        sharded = cls(weight, gradient, (4 + states) / replicas, size, working, decayed)
        if dtype == torch.float32 and zero.stage == 0:  # a weight is its own master
            return replace(sharded, optimizer=states)
        if zero.offloads:  # with a copy of the gradient; it still passes through the bucket
            host = (4 + states + 4 + weight) / replicas
            return replace(sharded, optimizer=0.0, working=0.0, step=0.0, host=host, bucket=weight)
        if gradient > weight:  # bf16, whose sums are fp32 already; replicas send each other rounded ones
            sent = sent_bytes(config)
            return replace(sharded, step=max(decayed, sent if replicas > 1 and sent < gradient else 0.0))
        if dtype == torch.bfloat16 and zero.stage == 0:  # the sharded gradient in fp32
            return replace(sharded, step=decayed + 4.0 / replicas)
        # The sharded gradient joined, in 16 bits and in fp32, or in fp32 alone; before the step, the bucket.
        copies = 4.0 if dtype == torch.float32 else weight + 4.0
        bucket = 0.0 if config.sums_while_computing and config.model_topo.stages > 1 else weight
        return replace(sharded, step=decayed + copies / replicas, bucket=bucket)

    def saved(self, replicas: int) -> float:
        """Bytes a parameter in a checkpoint: the weight, and the master weight and states of all replicas."""
        return self.weight + max(self.optimizer * replicas, self.host * replicas - 4 - self.weight)


def sent_bytes(config: TrainConfig) -> int:
    """Of a gradient, between replicas."""
    dtype = config.communication_data_type
    return training_dtype(config).itemsize if dtype is None else 4 if dtype == "fp32" else 2

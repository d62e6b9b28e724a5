"""Plain ZeRO (`train_ds_zero.py --plan`): what a process keeps, and what it sends in each micro-batch.

Each process has all layers, and rows of its own. From stage 2 on it keeps its share of the gradients, at stage 3 of the
weights too. Then every micro-batch gathers each weight for the forward pass and again for the backward pass, and
reduces the gradients (arXiv:1910.02054, section 7). `zero_hpz_partition_size` keeps a second share of the weights, by
which the backward pass gathers among neighbours (arXiv:2306.10209). Weights are gathered one by one, as by DeepSpeed
0.19.8; smaller ones than `stage3_param_persistence_threshold` stay whole.

Nothing of that counts as hidden behind computation, though DeepSpeed prefetches: of gdGPT's runs those whose rows take
0.103 s longer to compute take 0.123 s longer (docs/performance.md#why-a-pipeline-is-faster-than-zero-3).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from common.quantities import GIGA
from training.config.keys import TrainConfig
from training.config.precision import training_dtype

if TYPE_CHECKING:
    from options.planner.inputs import Basis

# DeepSpeed's defaults, in numbers: weights that stay whole are smaller, and at most so many are gathered at a time.
DEFAULTS = {"stage3_param_persistence_threshold": 1e5, "stage3_max_live_parameters": 1e9, "zero_hpz_partition_size": 1}
SHARED = ["nothing", "the optimizer", "optimizer and gradients", "optimizer, gradients and weights"]


def _key(config: TrainConfig, name: str) -> Any:
    return (config.zero_optimization.model_extra or {}).get(name, DEFAULTS[name])


def kept(config: TrainConfig, parameters: int) -> tuple[float, float, int]:
    """Return the shares of weights and of gradients that a process keeps, and the most bytes that it has gathered."""
    stage, replicas = config.zero_optimization.stage, config.model_topo.replicas
    if stage < 3:
        return 1.0, 1 / replicas if stage > 1 else 1.0, 0
    neighbours, live = _key(config, "zero_hpz_partition_size"), _key(config, "stage3_max_live_parameters")
    weights = 1 / replicas + (1 / neighbours if neighbours > 1 else 0.0)
    return weights, 1 / replicas, int(min(live, parameters)) * training_dtype(config).itemsize


def seconds(basis: Basis, layer: int, gradient: int) -> tuple[float, float]:
    """Return the time of a layer's messages in the forward and the backward pass of a micro-batch.

    Args:
        gradient: bytes of a gradient's element as it is sent.
    """
    config, ranks = basis.config, basis.config.model_topo.along("data")
    everybody = basis.fabric.group(ranks)
    reduced = everybody.gather(gradient * basis.trained[layer]) if config.zero_optimization.stage > 1 else 0.0
    if config.zero_optimization.stage < 3:
        return 0.0, reduced
    neighbours = _key(config, "zero_hpz_partition_size")
    near = basis.fabric.group(ranks.reshape(-1, neighbours)) if neighbours > 1 else everybody
    numbers, least = map(prod, basis.shapes(layer).values()), _key(config, "stage3_param_persistence_threshold")
    sizes = [training_dtype(config).itemsize * number for number in numbers if number >= least]
    return sum(map(everybody.gather, sizes)), sum(map(near.gather, sizes)) + reduced


def describe_sharing(basis: Basis) -> str:
    """Say in a line what the processes share, and what a micro-batch gathers."""
    config, stage = basis.config, basis.config.zero_optimization.stage
    line = f"ZeRO: stage {stage}, {config.model_topo.replicas} processes share {SHARED[stage]}"
    size = training_dtype(config).itemsize * sum(basis.parameters) / GIGA
    return f"{line}; each micro-batch gathers {size:.1f} GB twice, and reduces gradients" if stage == 3 else line

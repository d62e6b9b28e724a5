"""Shrink the user's config: few steps, short samples, and no more processes than this machine can run.

Unchanged: precision, optimizer, clipping, schedule, losses, packing, recomputation, offload, compilation, attention,
the axes, and the form of `dims` and `parts`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from models.spec import ModelSpec
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo
from training.errors import ConfigError

MODEL, DATA, EVALUATION = "model", "data.jsonl", "evaluation.jsonl"  # in the folder of a small run
STEPS, SAVED = 4, 2  # steps of the small run; the step it is resumed from
LENGTH = 48  # most tokens of a sample
MICRO_BATCH = 4  # most rows
PROCESSES = 4  # without GPUs, if there are no more cores
PARTS = 2  # most tensor-parallel ranks: a small model may have no more key heads
LR = 1e-3  # least: a smaller update drowns in the rounding of the weights
WARM_UP = 2  # most steps
# Keys that the prepared samples do not need, or that only take time.
DROPPED_KEYS = (
    "stream_gb pack_len gradient_accumulation_steps profile_steps rebalance storage save_minutes template_args "
    "template_fallback max_restarts ports eval_share".split()
)
LOSS_SCALE = 8  # initial power of two for fp16, small enough that no step is skipped


def available_processes() -> int:
    """Return the number of processes that a proof may start on this machine."""
    return torch.cuda.device_count() or max(PROCESSES, len(os.sched_getaffinity(0)))


def small_topology(config: TrainConfig, processes: int) -> ModelTopo:
    """Return the same grid if it fits, else fewer stages and at most two replicas; uneven parts stay uneven."""
    topo = config.model_topo
    stages, replicas, tensor = topo.stages, topo.replicas, min(topo.tensor, PARTS, processes)
    if stages * replicas * tensor > processes:
        left = processes // tensor
        stages = min(stages, max(1, left // min(replicas, 2)))
        replicas = min(replicas, left // stages)
    small = topo.spread(stages, replicas, tensor).model_copy(update={"sequence": math.gcd(topo.sequence, replicas)})
    if topo.parts is None or stages != topo.stages:
        return small
    least, size = min(topo.parts), max(2, 4 // len(topo.parts))
    parts = [min(each, size if each == least else size + 1) for each in topo.parts]
    return small.model_copy(update={"parts": parts})


def small_depth(config: TrainConfig, topo: ModelTopo, n_layers: int) -> int:
    """Return the layers of the small model: the sum of `parts`, or two for each chunk and one more."""
    chunks = config.model_copy(update={"model_topo": topo}).chunks
    return sum(topo.parts) if topo.parts else min(n_layers, max(5, 2 * chunks + 1))


def comparable_numerics(config: TrainConfig, spec: ModelSpec) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of precision and order that make results comparable, and a line for each."""
    values: dict[str, Any] = {}
    lines = []
    if spec.has_experts and training_dtype(config) is not torch.float32:
        lines.append("precision: fp32, as rounding alone can make a router choose another expert")
        values |= {"bf16": {}, "fp16": {}}
    if torch.cuda.is_available() and not config.deterministic:
        lines.append("deterministic: true, as without it no two runs on a GPU are equal to the last bit")
        values["deterministic"] = True
    if config.tf32:
        lines.append("tf32: false, as the bounds are those of fp32")
        values["tf32"] = False
    if config.fp8.enabled:
        lines.append("fp8: off, as the bounds are those of bf16")
        values["fp8"] = {}
    return values, lines


def small_config(config: TrainConfig, spec: ModelSpec, topo: ModelTopo, folder: Path) -> tuple[TrainConfig, list[str]]:
    """Make the config of the small run in `folder`, and a line for each difference from the user's.

    Raises:
        ConfigError: the run keeps no fp32 weights to compare.
    """
    for name in ("bf16", "fp16"):
        if getattr(getattr(config, name), key := f"{name}_master_weights_and_grads"):
            raise ConfigError(f"--prove: {name}.{key} leaves no fp32 weights to compare; expected none of it")
    values, lines = config.dump(), []
    if topo.processes != config.model_topo.processes:
        dims = f"{config.model_topo.process_topology.dims} -> {topo.process_topology.dims}"
        limits = f"this machine has room for {available_processes()} processes, and a small layer for {PARTS} parts"
        lines.append(f"dims: {dims}, as {limits}")
    numerics, why = comparable_numerics(config, spec)
    values |= numerics
    lines += why
    if config.fp16.enabled and values["fp16"] and config.fp16.loss_scale is None:
        values["fp16"]["initial_scale_power"] = LOSS_SCALE
    params = config.optimizer.params
    if params.get("lr", LR) < LR:
        lines.append(f"lr: {params['lr']:g} -> {LR:g}, so that a step is larger than the rounding of a weight")
        values["optimizer"]["params"]["lr"] = LR
    if config.scheduler:
        warm_up = config.scheduler.params.warmup_num_steps
        values["scheduler"]["params"]["warmup_num_steps"] = min(warm_up, WARM_UP)
    if isinstance(config.use_grad_ckpt, dict):
        values["use_grad_ckpt"] = {"every": min(config.use_grad_ckpt["every"], 2)}
    micro_batch = min(config.train_micro_batch_size_per_gpu, MICRO_BATCH)
    unit = micro_batch * topo.replicas
    steps = config.train_batch_size // (config.train_micro_batch_size_per_gpu * config.model_topo.replicas)
    small = config.model_copy(update={"model_topo": topo})
    for key in DROPPED_KEYS:
        values.pop(key, None)
    if config.stream_gb:
        lines.append("stream_gb: the samples of the first window, not streamed")
    values |= {
        "model_path": str(folder / MODEL),
        "data_path": [{"path": str(folder / DATA), "format": "tokens"}],
        "eval_data_path": [{"path": str(folder / EVALUATION), "format": "tokens"}],
        "save_path": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "model_topo": topo.model_dump(mode="json", exclude_none=True),
        "train_micro_batch_size_per_gpu": micro_batch,
        "train_batch_size": unit * min(steps, 4 * small.chunks),
        "max_steps": STEPS,
        "max_seq_len": LENGTH,
        "dataloader_drop_last": config.dataloader_drop_last and config.packing != "dataset",  # too few rows
        "from_scratch": False,
        "prompt_format": "plain",
        "mask": "assistant",
        "resume": "auto",
        "save_interval": SAVED,
        "keep_last": STEPS,
        "eval_interval": SAVED,
        "export_hf": False,
        "tensorboard": {"enabled": False},
        "wandb": {"enabled": False},
    }
    if config.packing:
        values["pack_len"] = 2 * LENGTH
    return TrainConfig.model_validate(values), lines

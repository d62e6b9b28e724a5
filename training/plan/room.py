"""Whether each host has room for a run: memory for what its ranks hold all the time, and a disk for a checkpoint.

Only what is certain counts: weights, gradients and the optimizer's states, without activations. A run that has not even
that would be killed by the kernel in its first step, or could never save; it is refused before it is built.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from models.spec import ModelSpec
from models.tensor_parallel import part_shapes
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.errors import ConfigError
from training.plan.optimizer_memory import StateBytes

GB = 1e9


def check_room(config: TrainConfig, spec: ModelSpec, layers: Sequence[int], disk: Disk) -> None:
    """See that memory and disk suffice; all ranks call it together.

    Args:
        layers: those that this rank's stage holds.
        disk: that checkpoints go to.

    Raises:
        RunRefused: on every rank, where they do not on some host.
    """
    state, replicas = StateBytes.of(config), config.model_topo.replicas
    sharers = config.model_topo.tensor
    weights = sum(shape.numel() for layer in layers for shape in part_shapes(spec, layer, sharers).values())
    in_memory = state.host
    if not torch.cuda.is_available():  # ZeRO 2 and 3 shard more than the optimizer
        stage = config.zero_optimization.stage
        in_memory += state.optimizer + state.gradient / (replicas if stage > 1 else 1)
        in_memory += state.weight / (replicas if stage > 2 else 1)
    share = weights * state.saved(replicas) / replicas
    copied = share if config.save_async else 0
    told = gather((socket.gethostname(), disk.host, weights * in_memory + copied, share))
    held = sum(here for host, _, here, _ in told if host == socket.gethostname())
    saved = sum(share for _, host, _, share in told if host == disk.host)
    with agreed():
        free = psutil.virtual_memory().available + psutil.swap_memory().free
        if held > free:
            copies = " with the copies of save_async" if config.save_async else ""
            raise ConfigError(
                f"memory: {free / GB:.1f} GB are free; expected more than {held / GB:.1f} GB, which weights, gradients "
                f"and optimizer states of its processes take{copies}"
            )
        free = shutil.disk_usage(config.save_path).free
        if disk.keeps and saved > free:
            raise ConfigError(
                f"save_path: {Path(config.save_path)}: {free / GB:.3f} GB are free; expected more than "
                f"{saved / GB:.3f} GB, which a checkpoint takes"
            )

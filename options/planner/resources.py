"""Check RAM and disk on each host before a run, and explain an out-of-memory error in one line.

Before the run only what is certain counts: weights, gradients and optimizer states, without activations. A run without
room for these would be killed by the kernel in its first step, or could never save.
"""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from pydantic import ByteSize, TypeAdapter

from common.quantities import gigabytes
from data.loader import Loader
from models.parallel.tensor import part_shapes
from models.spec import ModelSpec
from options.planner.inputs import Basis, Workload
from options.planner.memory import MASTER, StateBytes, beside_weights
from options.planner.plan import Plan
from options.planner.search import next_change
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.errors import ConfigError
from training.metrics.devices import this_device
from training.metrics.peak_memory import peak_memory

ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)  # of CUDA's allocator and of the CPU's


def check_resources(config: TrainConfig, spec: ModelSpec, layers: Sequence[int], disk: Disk) -> None:
    """Check memory and disk; all ranks call it together.

    Args:
        layers: of this rank's stage.
        disk: for checkpoints.

    Raises:
        RunRefused: on every rank, where they do not suffice on some host.
    """
    # How many of the rank's weights there are, and how many of them are trained.
    state, replicas = StateBytes.of(config), config.model_topo.replicas
    weights = trained = 0
    for layer in layers:
        shapes, names = part_shapes(spec, layer, config.model_topo.tensor), spec.trained_names(layer)
        weights += sum(shape.numel() for shape in shapes.values())
        trained += sum(shapes[name].numel() for name in names)
    frozen_bytes = (weights - trained) * state.weight

    # What they take of the host's memory: all where it is the one to compute in, else what is offloaded.
    in_memory = trained * state.host
    if config.weights_on_host:
        in_memory = trained * (state.weight + MASTER + sum(beside_weights(config))) + frozen_bytes
    elif not torch.cuda.is_available():
        stage = config.zero_optimization.stage  # ZeRO 2 and 3 shard more than the optimizer
        a_weight = state.host + state.optimizer + state.gradient / (replicas if stage > 1 else 1)
        a_weight += state.weight / (replicas if stage > 2 else 1)
        in_memory = trained * a_weight + frozen_bytes

    # And of a checkpoint, of which save_async holds a copy.
    share = (trained * state.checkpoint(replicas) + (0 if config.lora else frozen_bytes)) / replicas
    copied = share if config.save_async else 0

    ranks = gather((socket.gethostname(), disk.host, in_memory + copied, share))
    held = sum(here for host, _, here, _ in ranks if host == socket.gethostname())
    saved = sum(share for _, host, _, share in ranks if host == disk.host)
    with agreed():
        free = psutil.virtual_memory().available + psutil.swap_memory().free
        if held > free:
            copies = " with the copies of save_async" if config.save_async else ""
            raise ConfigError(
                f"memory: {gigabytes(free)} are free; expected more than {gigabytes(held)}, which weights, "
                f"gradients and optimizer states of its processes take{copies}"
            )

        free = shutil.disk_usage(config.save_path).free
        if disk.owns_folder and saved > free:
            raise ConfigError(
                f"save_path: {Path(config.save_path)}: {gigabytes(free)} are free; expected more than "
                f"{gigabytes(saved)}, which a checkpoint takes"
            )


@contextmanager
def explain_out_of_memory(config: TrainConfig, spec: ModelSpec, stage: int, loader: Loader | None) -> Iterator[None]:
    """Turn torch's out-of-memory error into one line: stage, peak, plan, and the next cheapest change.

    Args:
        config: without `parts` (plain ZeRO), nothing is estimated.
        stage: of this process; 0 under plain ZeRO.
        loader: of the data to plan for; every sample counts as `max_seq_len` tokens where absent.

    Raises:
        ConfigError: memory has run out.
    """
    try:
        yield
    except RuntimeError as error:
        if asked := ASKED.search(str(error)):
            size = TypeAdapter(ByteSize).validate_python(asked[1].replace("bytes", "B"))
            where = "this machine's memory"
            if torch.cuda.is_available():
                total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
                where = f"the {gigabytes(total)} of {torch.cuda.get_device_name()}"
            peak = f"out of memory: stage {stage} had at most {gigabytes(peak_memory())} of {where}"
            planned = _planned(config, spec, stage, loader)
            raise ConfigError(f"{peak}, and asked for {gigabytes(size)}{planned}") from error
        raise


def _planned(config: TrainConfig, spec: ModelSpec, stage: int, loader: Loader | None) -> str:
    if config.model_topo.parts is None:
        return ""
    if config.weights_on_host:
        return "; expected fewer or shorter rows in a micro-batch (train_micro_batch_size_per_gpu, pack_len)"
    plan = Plan.make(Basis.of_run(config, spec, Workload.of(loader, config), this_device())[0])
    line = f"; --plan says {gigabytes(plan.stages[stage].memory.peak)}"
    advice = next_change(plan, stage)
    return f"{line}; next: {advice[0]}, with which it says {gigabytes(advice[1])}" if advice else line

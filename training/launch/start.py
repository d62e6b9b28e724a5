"""Replace an entry point that no launcher started by a supervisor, for this machine or the hosts of a hostfile."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from common import early_signals
from common.quantities import counted
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.launch.hosts import PREFIX, exported_variables
from training.launch.slurm import requeue
from training.launch.supervisor import JOB, Shape

FEW, PER_CORE = 16, 4  # processes that a machine without GPUs may have: 16, or 4 for each core
SUPERVISOR = f"{PREFIX} from {__package__}.supervisor import main; main()"

Hosts = dict[str, list[int]]  # the devices of each


def launch(
    config: TrainConfig, hosts: Hosts | None = None, reload: Callable[[str], TrainConfig] | None = None
) -> NoReturn:
    """Replace this process by a supervisor that runs the same command in as many processes as the topology has.

    Args:
        hosts: None for this machine.
        reload: returns the config with one more override, with which a run goes on over fewer hosts.
    """
    grid, processes = config.model_topo.process_topology, config.model_topo.processes
    early_signals.note(config.preemption_signals)
    announce(processes, f"on {', '.join(hosts)}" if hosts else "")
    if hosts is None:
        check_machine(config)
        name_accelerator()
    elif (slots := sum(map(len, hosts.values()))) != processes:
        raise ConfigError(
            f"--hostfile: {slots} slots on {', '.join(hosts)}, but model_topo.process_topology.dims: {grid.dims} ask "
            f"for {processes} processes; expected as many, by slots=, --include or --exclude"
        )

    # Where hosts may fail, also the shapes of the run with fewer replicas.
    shapes: list[Shape] = [(processes, [], f"dims {grid.dims}")]
    if reload and config.max_restarts:
        for replicas in range(config.model_topo.replicas - 1, 0, -1):
            dims = config.model_topo.spread(config.model_topo.stages, replicas).process_topology.dims
            override = f"model_topo.process_topology.dims={dims}"
            with suppress(ConfigError):  # such as a batch that these replicas cannot share
                shapes.append((reload(override).model_topo.processes, [override], f"dims {dims}"))

    signals = [signal.Signals[name] for name in config.preemption_signals]
    job = {
        "environment": exported_variables() if hosts else {},
        "hosts": hosts or {"": list(range(processes))},
        "shapes": shapes,
        "save_path": config.save_path,
        "max_restarts": config.max_restarts,
        "patience": config.timeout_minutes * 60,
        "signals": signals,
        "port": config.ports.meeting,
    }

    signal.pthread_sigmask(signal.SIG_BLOCK, {*early_signals.ALL, *signals})  # until the supervisor heeds them
    if early_signals.received:
        requeue()
        early_signals.leave(early_signals.received[0])
    sys.stdout.flush()
    os.environ[JOB] = json.dumps(job)  # not in the arguments, as .deepspeed_env may hold secrets
    os.execv(sys.executable, [sys.executable, "-c", SUPERVISOR, *sys.argv])


def announce(processes: int, where: str = "") -> None:
    """Say what starts, and where, if not on this machine alone; before all that takes seconds to import."""
    cores = counted(len(os.sched_getaffinity(0)), "core")
    print(f"start: {counted(processes, 'process')} {where or f'on this machine ({cores})'}", flush=True)


def name_accelerator() -> None:
    """Name the CPU as DeepSpeed's accelerator on a machine without GPUs, before an import that prints a warning."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def check_machine(config: TrainConfig) -> None:
    """Raise a ConfigError if this machine has too few GPUs or cores for the processes."""
    import torch

    topology, gpus, cores = config.model_topo, torch.cuda.device_count(), len(os.sched_getaffinity(0))
    most = gpus or max(FEW, PER_CORE * cores)
    if topology.processes > most:
        has = f"no GPU and {cores} cores; expected at most {most}"
        if gpus:
            has = f"{gpus} GPUs; name several machines with --hostfile"
        if gpus and "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
            has = (
                "one GPU for them: CUDA_VISIBLE_DEVICES names slices of GPUs (MIG), and CUDA shows a process the first "
                "alone; expected one process, or whole GPUs"
            )
        raise ConfigError(
            f"model_topo.process_topology.dims: {topology.process_topology.dims} ask for {topology.processes} "
            f"processes, but this machine has {has}"
        )

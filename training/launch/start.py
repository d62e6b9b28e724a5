"""Replace an entry point that no launcher started by a supervisor."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import NoReturn

from common import early_signals
from common.quantities import counted
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.launch.agent import PREFIX
from training.launch.slurm import requeue
from training.launch.supervisor import JOB

FEW, PER_CORE = 16, 4  # processes that a machine without GPUs may have: 16, or 4 for each core
SUPERVISOR = f"{PREFIX} from {__package__}.supervisor import main; main()"


def launch(config: TrainConfig) -> NoReturn:
    """Replace this process by a supervisor that runs the same command in as many processes as the topology has.

    Raises:
        ConfigError: this machine has too few GPUs or cores for them.
    """
    early_signals.note(config.preemption_signals)
    announce(config.model_topo.processes)
    check_machine(config)
    name_accelerator()
    become_supervisor(config, SUPERVISOR)


def become_supervisor(config: TrainConfig, program: str, **more: object) -> NoReturn:
    """Replace this process by a supervisor of the same command.

    Args:
        program: Python's, of the supervisor.
        more: what its job has besides that of one machine.
    """
    signals = [signal.Signals[name] for name in config.preemption_signals]
    topo = config.model_topo
    job = more | {
        "shape": (topo.processes, [], f"dims {topo.process_topology.dims}"),
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
    os.execv(sys.executable, [sys.executable, "-c", program, *sys.argv])


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

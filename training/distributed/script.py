"""Run one rank's job, for an entry point or for a script that goes on afterwards."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common import early_signals, phases
from common.early_signals import REQUESTS
from training.config.yaml_file import Config
from training.distributed import joining, processes
from training.distributed.placement import choose_axes
from training.distributed.processes import LAUNCHER_GONE, ProcessInfo
from training.errors import ConfigError, exit_with_one_line, keep_tracebacks_in
from training.launch.agent import RUN
from training.launch.start import announce, launch

if TYPE_CHECKING:
    from training.distributed.rank_monitor import RankMonitor

_trained = False  # in this process


def run_or_launch(
    config: Config, process: ProcessInfo | None, run: Callable[[Config, ProcessInfo, RankMonitor], bool]
) -> None:
    """Run one rank's job; if no launcher started this process, launch the same command in processes.

    Args:
        run: does the whole job; returns whether the processes are to start over.
    """
    if process is None:
        config.check_packages()
        launch(config)
    joining.check_number(process, config.model_topo)
    if config.max_restarts and RUN not in os.environ:
        raise ConfigError(
            f"max_restarts: {config.max_restarts}: a launcher such as deepspeed or torchrun ends with its run; "
            f"expected python {Path(sys.argv[0]).name}, for several machines with --hostfile, or max_restarts: 0"
        )
    early_signals.note(config.preemption_signals)
    if process.rank == 0 and RUN not in os.environ:
        announce(process.world_size, "" if process.local_size == process.world_size else "on several machines")
    phases.enter("importing torch and DeepSpeed", first=True)
    from training.distributed.rank_monitor import RankMonitor  # takes seconds

    # The failure detector must find a hang, and name the rank, before the process group gives up.
    patience = timedelta(minutes=max(30, 2 * config.timeout_minutes))
    joining.join(process, patience, config.ports.meeting)
    import torch

    names = Counter(processes.gather(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"))
    if process.rank == 0:
        counted = [name if name == "CPU" else f"{count} x {name}" for name, count in names.items()]
        print(f"devices: {', '.join(counted)}", flush=True)
    config, lines = choose_axes(config, processes.gather(socket.gethostname()))
    if process.rank == 0 and lines:
        print("\n".join(lines), flush=True)
    stage, port = config.model_topo.stage_of(process.rank), config.ports.failure_detector or 0
    with RankMonitor(process, stage, config.timeout_minutes, port) as monitor:
        again = run(config, process, monitor)
    if again:
        joining.start_over(config.ports.meeting)
    joining.stop()


def run_from_script(
    load: Callable[[ProcessInfo | None], Config], run: Callable[[Config, ProcessInfo, RankMonitor], bool]
) -> None:
    """Train as an entry point does, and return afterwards. Once in a process: its ranks cannot meet again.

    Args:
        load: returns the checked config.
        run: see `run_or_launch`; the script itself starts over.
    """
    process = ProcessInfo.from_environment()
    if process is not None:
        joining.end_with_launcher(process)
    with exit_with_one_line(process.rank if process else None, goes_on=True):
        global _trained  # noqa: PLW0603  # a fact about the process
        if _trained:
            raise ConfigError("train: a process trains once; expected a script of its own for each training")
        _trained = process is not None
        config = load(process)
        config.check_entry_point(in_stages=True)
        keep_tracebacks_in(config.save_path)
        preemption = [signal.Signals[name] for name in config.preemption_signals]
        handlers = {number: signal.getsignal(number) for number in (*REQUESTS, LAUNCHER_GONE, *preemption)}
        run_or_launch(config, process, run)
        for number, handler in handlers.items():  # those of the run would ask it to save
            signal.signal(number, handler)

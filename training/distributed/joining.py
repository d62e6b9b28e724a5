"""Join the processes of a run, and end them with their launcher.

What imports torch or DeepSpeed does so in its own time: an entry point is here before either is there.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

import psutil

from common import early_signals, phases
from common.early_signals import REQUESTS
from training.config.model_topo import ModelTopo
from training.distributed import freed_memory
from training.distributed.processes import LAUNCHER_GONE, ProcessInfo, gather
from training.errors import ConfigError, RunRefused, print_to_stderr
from training.launch.agent import free_port

TIME_TO_SAVE = 3600.0  # seconds; if it hangs, the failure detector ends it before
SMALL = 256  # hidden size below which the threads of a CPU wait for each other longer than they compute
RUNNERS = ("deepspeed.launcher.runner", "deepspeed", "deepspeed.pt", "ds")  # what starts DeepSpeed's launch.py


class LossyStream:
    """Drops what cannot be written: the reader may end with the launcher, and the run still has to save."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def end_with_launcher(process: ProcessInfo) -> None:
    """Save and end this process when its launcher is gone, as nobody could stop it any more.

    The launcher is the parent, and what runs DeepSpeed's launch.py: its runner, or over ssh all up to sshd, and pdsh
    with its runner where they are on this host. What is above them, such as a shell, may end.
    """
    from training.launch import pdsh

    sys.stdout, sys.stderr = cast(TextIO, LossyStream(sys.stdout)), cast(TextIO, LossyStream(sys.stderr))
    links, connections = [(psutil.Process(), early_signals.started_by)], []
    with suppress(psutil.Error):  # a launcher of another user may be hidden, as one outside of a container is
        launcher = psutil.Process(early_signals.started_by)
        above = launcher.parents()
        if above and any(Path(word).name in RUNNERS for word in above[0].cmdline()):
            links.append((launcher, above[0].pid))
        elif "deepspeed.launcher.launch" in launcher.cmdline():
            reach = next((number for number, each in enumerate(above) if each.name().startswith("sshd")), -1) + 1
            links += zip([launcher, *above], (each.pid for each in above[:reach]), strict=False)
            if started_by := pdsh.find():
                links.append((started_by, started_by.ppid()))
                connections = started_by.children()

    def watch() -> None:
        with suppress(psutil.Error):
            while all(child.ppid() == parent for child, parent in links):
                time.sleep(0.5)
        for ssh in connections:  # ends the run on the other hosts
            with suppress(psutil.Error):
                ssh.kill()
        nothing_to_save = signal.getsignal(LAUNCHER_GONE) == signal.SIG_DFL
        if nothing_to_save and process.local_rank == 0:
            print_to_stderr("error: the launcher is gone")
        os.kill(os.getpid(), LAUNCHER_GONE)
        time.sleep(TIME_TO_SAVE)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def check_number(process: ProcessInfo, topology: ModelTopo) -> None:
    """Compare the processes that were started with those that `dims` asks for, before anything large is imported.

    Raises:
        ConfigError: there are more or fewer; on other ranks than 0, which says it for all, RunRefused.
    """
    if process.world_size != topology.processes:
        kind: type[Exception] = RunRefused if process.rank else ConfigError
        raise kind(
            f"model_topo.process_topology.dims: {topology.process_topology.dims} ask for {topology.processes} "
            f"processes, but {process.world_size} were started; expected --num_gpus {topology.processes}, "
            f"{topology.processes} slots of a hostfile, or srun --ntasks {topology.processes}"
        )


def join(process: ProcessInfo, patience: timedelta = timedelta(minutes=30), port: int | None = None) -> None:
    """Join the other processes of the launcher: by NCCL on GPUs, by gloo elsewhere.

    Args:
        patience: timeout of one operation.
        port: of the rendezvous, instead of the launcher's.

    Raises:
        ConfigError: no rendezvous, fewer GPUs than processes on this host, or no kernels for them in torch.
        RunRefused: on every rank, if one never comes.
    """
    if port and os.environ["MASTER_PORT"] != str(port):
        if process.rank == 0:
            print(f"ports.meeting: the ranks meet at port {port} instead of {os.environ['MASTER_PORT']}", flush=True)
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}

    # What torch and DeepSpeed read when they are imported or first used, so before that.
    # Keeps packed sequences of many lengths from fragmenting a GPU's memory. torch 2.11 and 2.13 read it at the first
    # allocation, not when torch is imported (only `backend` is read there).
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Else NCCL aborts the ranks that notice a lost one, before the failure detector can name it.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    import torch

    if not torch.cuda.is_available():
        set_threads(process.local_size)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        freed_memory.keep()
        if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from training.config.gpu import check_wheel
    from training.distributed.rendezvous import meet

    deepspeed.utils.logger.setLevel("WARNING")
    # It warns of an optimizer to which zero_allow_untested_optimizer consents; without consent it refuses it.
    deepspeed.utils.logger.addFilter(lambda record: "untested optimizer" not in str(record.msg))
    # DeepSpeed makes its groups with the default timeout, which NCCL's processes would not outlive.
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(torch.distributed.distributed_c10d, default, patience)

    if get_accelerator().device_name() == "cpu":
        # On a CPU DeepSpeed compiles a shared-memory collective at first use, for 100 s; gloo never calls it.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    elif (gpus := torch.cuda.device_count()) <= process.local_rank:
        raise ConfigError(
            f"host {socket.gethostname()} has {process.local_size} processes, of which this one sees {gpus} GPUs; "
            f"expected {gpus} slots there, or with srun --gpus-per-node {process.local_size} --gpu-bind none"
        )
    else:
        get_accelerator().set_device(process.local_rank)
        check_wheel()

    phases.enter("waiting for all processes")
    try:
        store = meet(process.rank, process.world_size, process.local_size, patience)
        with early_signals.left_to_kernel():
            deepspeed.init_distributed(verbose=False, timeout=patience)
        del store  # the process group has its own reference
    except (torch.distributed.DistError, OSError) as error:
        raise ConfigError(
            f"the processes cannot meet at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: "
            f"{str(error).splitlines()[0]}; expected a port of rank 0's host that no other run uses and no firewall "
            "closes (ports.meeting)"
        ) from None


def set_threads(processes: int, hidden_size: int = SMALL) -> None:
    """Divide this host's cores among its processes, one each for a small model; the user's OMP_NUM_THREADS counts."""
    import torch

    asked = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets 1 where its user set nothing (torch/distributed/run.py). DeepSpeed sets it only when it binds cores
    # (launcher/launch.py), which the user asked for; srun and our own supervisor leave it alone.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(psutil.Error):  # what torchrun was started with
            asked = psutil.Process(os.getppid()).environ().get("OMP_NUM_THREADS")
    if not asked:
        torch.set_num_threads(1 if hidden_size < SMALL else max(1, len(os.sched_getaffinity(0)) // processes))


def stop() -> None:
    """Leave the process group, if there is one."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start_over(port: int | None = None) -> NoReturn:
    """Replace this process by a new one of the same command; all ranks call it together.

    This frees all that the run holds: memory, the GPU's too, threads and connections. The launcher sees the same
    process. The new ones meet at `port`, or at a new one, as nobody knows when the old one is free.
    """
    import torch

    for child in psutil.Process().children(recursive=True):  # compilers and tokenizers
        with suppress(psutil.Error):
            child.kill()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing itself is closed by now
            os.set_inheritable(descriptor, descriptor <= 2)
    (free, *_) = gather(free_port() if torch.distributed.get_rank() == 0 else 0)
    stop()
    os.environ |= {"MASTER_PORT": str(port or free), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    signal.setitimer(signal.ITIMER_REAL, 0)  # of a request that came too late and has to be repeated
    for number in REQUESTS:
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

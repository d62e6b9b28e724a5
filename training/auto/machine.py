"""What a run may use: this machine's GPUs or cores, the slots of a hostfile, or devices that are only named.

A CPU may run any number of processes, each with its share of the cores: all numbers that divide the cores are tried, up
to `MOST`. Of its memory counts what is free now.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import psutil
import torch

from training.launch.start import Hosts
from training.metrics.devices import Device, parse_devices, this_device
from training.plan.rendering import GB

MOST = 8  # processes without GPUs
FREE = 0.9  # of the free memory, that may be planned with


@dataclass(frozen=True)
class Machine:
    """Where a run is to be started.

    Attributes:
        kind: of device; each process has one, or a share of a CPU.
        counts: the numbers of processes that may be started.
        memory: bytes of main memory that may be planned with, over all hosts.
        name: for people.
    """

    kind: Device
    counts: tuple[int, ...]
    memory: float
    name: str

    @classmethod
    def find(cls, hosts: Hosts | None, devices: str | None) -> Machine:
        """This machine, the hosts of a hostfile, which are taken to be like it, or devices as `--plan` knows them."""
        if devices:
            count, kind = parse_devices(devices)
            return cls(kind, (count,), math.inf, f"{count} x {kind.name}, as --devices says")
        kind, gpus, cores = this_device(), torch.cuda.device_count(), len(os.sched_getaffinity(0))
        memory = FREE * psutil.virtual_memory().available * len(hosts or [0])
        what = f"{gpus} x {kind.name}" if gpus else f"{cores} cores, {memory / GB:.0f} GB of memory for a run"
        if hosts:
            slots = sum(map(len, hosts.values()))
            return cls(kind, (slots,), memory, f"{slots} slots on {', '.join(hosts)}, taken to be like here: {what}")
        counts = (gpus,) if gpus else tuple(n for n in range(1, min(cores, MOST) + 1) if cores % n == 0)
        return cls(kind, counts, memory, what)

    def device(self, processes: int) -> Device:
        """What each of so many processes has."""
        return self.kind if self.kind.memory else replace(self.kind, memory=int(self.memory / processes))

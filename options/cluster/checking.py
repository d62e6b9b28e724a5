"""`--check`: compare the hosts of a run and measure the links between them, without training.

`deepspeed --hostfile ./hostfile train_ds.py --config F --check`. No checkpoint is touched. The measured links are saved
in the run's folder, for later plans (`options.planner.links`).
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.table import Column, Table

from common.quantities import GIGA
from data.paths import digests_folder
from options.cluster.measuring import measure
from options.planner.links import FILE, Link, Links
from options.planner.planning import divide
from options.planner.resources import check_resources
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo
from training.distributed.placement import Placement
from training.distributed.processes import ProcessInfo, gather
from training.distributed.rank_monitor import RankMonitor
from training.distributed.rendezvous import interface_of, own_address
from training.job import Job
from training.preflight import check_model, check_samples
from training.runs import language_model, trainer_kind

MEGA = 1e6


def check_run(config: TrainConfig, process: ProcessInfo, monitor: RankMonitor, in_stages: bool) -> bool:
    """Check the run on one rank; return False, as nothing starts over.

    Raises:
        RunRefused: on every rank, if something is missing or differs between hosts.
    """
    task = language_model(config, trainer_kind(config, in_stages))
    job = Job(task, config, process, monitor)
    log = job.log
    job.read()
    check_samples(task.order.fingerprint, job.eval_records or "none")
    check_model(task.model_folder, not config.from_scratch, digests_folder(config.cache_dir))
    job.division = divide(config, task.spec, in_stages, task.known_loader)
    check_resources(config, task.spec, job.layers, job.disk)
    hosts = gather(Host.here(config.save_path))
    links = measure(config.model_topo, [host.name for host in hosts])
    if process.rank == 0:
        links.write(Path(config.save_path))
        log.print(hosts_table(hosts))
        if links.stages or links.sums:
            log.print(links_table(links, config.model_topo))
        log.print(f"checked: nothing keeps {config.model_topo.processes} processes from training")
    return False


@dataclass(frozen=True)
class Host:
    """The host of one rank.

    Attributes:
        interface: network interface towards rank 0, with its address.
        disk, memory: free bytes; the disk is that of `save_path`.
        clock: seconds, read right after a barrier.
    """

    name: str
    interface: str
    disk: int
    memory: int
    clock: float

    @classmethod
    def here(cls, save_path: str) -> Host:
        torch.distributed.barrier()
        return cls(
            socket.gethostname(),
            interface(),
            shutil.disk_usage(save_path).free,
            psutil.virtual_memory().available,
            time.time(),
        )


def interface() -> str:
    """Return the network interface towards rank 0's host, with its address."""
    address = own_address(os.environ["MASTER_ADDR"])
    return f"{interface_of(address) or ''} {address}".strip()


def hosts_table(ranks: Sequence[Host]) -> Table:
    """Build the table of hosts, one row each."""
    headings = ["host", "ranks", "network interface", "free disk, GB", "free memory, GB", "clock, s"]
    made = Table(*(Column(heading, justify="right") for heading in headings), title="hosts: all alike")
    for name in dict.fromkeys(host.name for host in ranks):
        own = [rank for rank, host in enumerate(ranks) if host.name == name]
        host = ranks[own[0]]
        free = (f"{size / GIGA:,.1f}" for size in (host.disk, host.memory))
        clock = f"{host.clock - ranks[0].clock:+.1f}"
        made.add_row(name, ", ".join(map(str, own)), host.interface, *free, clock)
    return made


def links_table(links: Links, topology: ModelTopo) -> Table:
    """Build the table of links: between neighbouring stages, and within each stage's gradient sums."""
    headings = ["link", "hosts", "latency, ms", "bandwidth, MB/s"]
    made = Table(*(Column(heading, justify="right") for heading in headings), title=f"links, kept in {FILE}")
    pipelines = zip(*Placement(topology, tuple(links.hosts)).pipelines, strict=True)
    hosts = [", ".join(dict.fromkeys(stage_hosts)) for stage_hosts in pipelines]

    def add(name: str, where: str, link: Link) -> None:
        made.add_row(name, where, f"{1000 * link.latency:.3g}", f"{link.bandwidth / MEGA:,.0f}")

    for stage, link in enumerate(links.stages):
        add(f"stage {stage} to {stage + 1}", f"{hosts[stage]} to {hosts[stage + 1]}", link)
    for stage, link in enumerate(links.sums):
        add(f"sums of stage {stage}", hosts[stage], link)
    return made

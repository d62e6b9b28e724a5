"""Where the ranks of a run meet: at the address that MASTER_ADDR names, and at no other of the host.

Each says in the store that it is there, and rank 0 waits for all of them: who does not come is named, while those that
came leave. With several hosts each takes the network interface for gloo and NCCL by which it reaches the others, as its
own name often stands for a loopback address in /etc/hosts.

Nothing that comes in there is encrypted, and torch's store asks nobody who he is: the network has to be trusted.
"""

from __future__ import annotations

import base64
import errno
import ipaddress
import json
import os
import secrets
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from training.errors import RunRefused
from training.launch.pdsh import end_soon

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

PATIENCE = 90.0  # seconds without another rank, after which the ones that are missing never come
POLL = 0.2  # seconds between two looks at who came


def listen(ranks: int, on_this_host: int, port: int = 0) -> socket.socket:
    """A socket that the other ranks can connect to: at MASTER_ADDR's address where it is one of this host.

    Elsewhere, and where other hosts could not reach it, at every address, with a warning.

    Args:
        ranks: of the run.
        on_this_host: how many of them are here.
    """
    name = os.environ["MASTER_ADDR"]
    family, _, _, _, (address, *_) = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    if on_this_host == ranks or not ipaddress.ip_address(address).is_loopback:
        try:
            return socket.create_server((address, port), family=family, backlog=ranks)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    listener = socket.create_server(("", port), family=family, backlog=ranks)
    why = f"warning: MASTER_ADDR: {name} is {address} on this machine, where others cannot reach it"
    print(f"{why}; port {listener.getsockname()[1]} is open at every address", file=sys.stderr, flush=True)
    return listener


def meet(rank: int, ranks: int, on_this_host: int, patience: timedelta) -> TCPStore:
    """Wait until all ranks are there; the store by which the process group finds it, too.

    Args:
        patience: how long a rank waits once it has reached rank 0.

    Raises:
        RunRefused: on every rank that is there, where another one does not come.
        OSError: another run, or another program, has the port.
        torch.distributed.DistError: rank 0 cannot be reached, or left.
    """
    import torch

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own store
    opens = rank == 0 and not agents
    store = torch.distributed.TCPStore(
        address,
        port,
        is_master=opens,
        timeout=timedelta(seconds=PATIENCE),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listen(ranks, on_this_host, port).detach() if opens else None,  # torch would at every address
    )
    store.set_timeout(patience)
    attempt = torch.distributed.PrefixStore(f"pipetune-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", store)
    mine = json.dumps([secrets.token_hex(8), own_address(address)])
    if agents:
        attempt.set(str(rank), mine)
    elif attempt.compare_set(str(rank), "", mine).decode() != mine:
        raise OSError(errno.EADDRINUSE, f"another run has a rank {rank} there")
    if rank == 0:
        missing = absent(attempt, ranks)
        there = [str(each) for each in range(ranks) if each not in missing]
        addresses = [json.loads(told)[1] for told in attempt.multi_get(there)]
        elsewhere = [each for each in addresses if not ipaddress.ip_address(each).is_loopback]
        attempt.set("met", json.dumps([named(missing), *elsewhere[:1]]))
    who, *elsewhere = json.loads(attempt.get("met"))
    if who:
        time.sleep(0.0 if rank else 2 * POLL)  # the store ends with rank 0
        end_soon()
        raise RunRefused(
            f"{who} did not come to {address}:{port}, where the others waited {PATIENCE:.0f} s; expected all {ranks} "
            "ranks: what ssh, pdsh or srun printed may say why, or a firewall closes the port"
        )
    if ranks > on_this_host:
        choose_interface(address, *elsewhere)
    return store


def absent(store: Store, ranks: int) -> list[int]:
    """The ranks that are not there when nobody has come for PATIENCE; empty as soon as all are."""
    missing, last = set(range(ranks)), time.monotonic()
    while missing and time.monotonic() - last < PATIENCE:
        if came := {rank for rank in missing if store.check([str(rank)])}:
            missing, last = missing - came, time.monotonic()
        time.sleep(POLL if missing else 0)
    return sorted(missing)


def named(ranks: Iterable[int]) -> str:
    """Ranks for people: by host, where DeepSpeed's launcher, which started this process, says which is where."""
    hosts: list[str] = []
    with suppress(psutil.Error, ValueError):
        words = psutil.Process(os.getppid()).cmdline()
        (coded,) = (word.partition("=")[2] for word in words if word.startswith("--world_info="))
        hosts = [host for host, slots in json.loads(base64.urlsafe_b64decode(coded)).items() for _ in slots]
    by_host = defaultdict(list)
    for rank in ranks:
        by_host[f" (host {hosts[rank]})" if rank < len(hosts) else ""].append(str(rank))
    told = [f"rank{'s' * (len(here) > 1)} {', '.join(here)}{host}" for host, here in by_host.items()]
    return " and ".join(told)


def own_address(other: str) -> str:
    """The address of this host by which it reaches another one."""
    family, _, _, _, target = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # which sends nothing
        return str(probe.getsockname()[0])


def choose_interface(*others: str) -> None:
    """Let gloo and NCCL use the interface by which this host reaches the first of others, where the user chose none."""
    reached = [mine for mine in map(own_address, others) if not ipaddress.ip_address(mine).is_loopback]
    if reached and (name := interface_of(reached[0])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this name


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this host."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if address in {each.address for each in found}), None)

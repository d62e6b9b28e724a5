"""Rendezvous: let the ranks of a run find each other at MASTER_ADDR, or report which ones are missing.

Each rank registers in torch's store; rank 0 waits for all of them. On several hosts, gloo and NCCL get the network
interface by which a host reaches the others: its own name is often a loopback address in /etc/hosts.

Nothing is encrypted, and the store has no password: the network has to be trusted.
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
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from common.early_signals import left_to_kernel
from training.errors import RunRefused
from training.launch.pdsh import end_soon

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

PATIENCE = 90.0  # seconds without a new rank until the missing ones are given up
POLL = 0.2  # seconds between two looks at the store


def listen(ranks: int, on_this_host: int, port: int = 0) -> socket.socket:
    """Listen for the other ranks at MASTER_ADDR; at every address, with a warning, if they could not reach that one.

    Args:
        ranks: number of ranks of the run.
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
    reason = f"warning: MASTER_ADDR: {name} is {address} on this machine, where others cannot reach it"
    print(f"{reason}; port {listener.getsockname()[1]} is open at every address", file=sys.stderr, flush=True)
    return listener


def meet(rank: int, ranks: int, on_this_host: int, patience: timedelta) -> TCPStore:
    """Wait for all ranks; return the store, which the process group uses too.

    Args:
        patience: timeout of a rank that has reached rank 0.

    Raises:
        RunRefused: on every rank that came, if another one did not.
        OSError: another run or program has the port.
        torch.distributed.DistError: rank 0 cannot be reached, or left.
    """
    import torch

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # whose agent holds the store
    opens = rank == 0 and not by_torchrun
    with left_to_kernel():
        store = torch.distributed.TCPStore(
            address,
            port,
            is_master=opens,
            timeout=timedelta(seconds=PATIENCE),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listen(ranks, on_this_host, port).detach() if opens else None,  # torch listens everywhere
        )
    store.set_timeout(patience)

    # Each rank writes a number of its own and its address; who finds another's there is of another run.
    attempt = torch.distributed.PrefixStore(f"pipetune-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", store)
    mine = json.dumps([secrets.token_hex(8), own_address(address)])
    if by_torchrun:
        attempt.set(str(rank), mine)
    elif attempt.compare_set(str(rank), "", mine).decode() != mine:
        raise OSError(errno.EADDRINUSE, f"another run has a rank {rank} there")

    # The first rank waits for all, and tells them who is missing, and an address that leads to another host.
    if rank == 0:
        missing = missing_ranks(attempt, ranks)
        present = [str(other) for other in range(ranks) if other not in missing]
        addresses = [json.loads(entry)[1] for entry in attempt.multi_get(present)]
        remote = [other for other in addresses if not ipaddress.ip_address(other).is_loopback]
        attempt.set("met", json.dumps([describe_ranks(missing), *remote[:1]]))
    with left_to_kernel():
        missing_names, *remote = json.loads(attempt.get("met"))

    if missing_names:
        time.sleep(0.0 if rank else 2 * POLL)  # the store ends with rank 0
        end_soon()
        raise RunRefused(
            f"{missing_names} did not come to {address}:{port}, where the others waited {PATIENCE:.0f} s; expected all "
            f"{ranks} ranks: what ssh, pdsh or srun printed may say why, or a firewall closes the port"
        )

    if ranks > on_this_host:
        choose_interface(address, *remote)
    return store


def missing_ranks(store: Store, ranks: int) -> list[int]:
    """Wait for ranks until no new one has come for PATIENCE; return those that are missing."""
    missing, last = set(range(ranks)), time.monotonic()
    while missing and time.monotonic() - last < PATIENCE:
        if came := {rank for rank in missing if store.check([str(rank)])}:
            missing, last = missing - came, time.monotonic()
        time.sleep(POLL if missing else 0)
    return sorted(missing)


def describe_ranks(ranks: list[int]) -> str:
    """Name ranks, with their hosts if this process's parent is DeepSpeed's launcher, which knows them."""
    hosts: list[str] = []
    with suppress(psutil.Error, ValueError):
        words = psutil.Process(os.getppid()).cmdline()
        (coded,) = (word.partition("=")[2] for word in words if word.startswith("--world_info="))
        for host, slots in json.loads(base64.urlsafe_b64decode(coded)).items():
            hosts += [host] * len(slots)

    by_host = defaultdict(list)
    for rank in ranks:
        by_host[f" (host {hosts[rank]})" if rank < len(hosts) else ""].append(str(rank))
    named = []
    for host, its_ranks in by_host.items():
        noun = "rank" if len(its_ranks) == 1 else "ranks"
        named.append(f"{noun} {', '.join(its_ranks)}{host}")
    return " and ".join(named)


def own_address(other: str) -> str:
    """Return the address by which this host reaches another one."""
    family, _, _, _, target = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # which sends nothing
        return str(probe.getsockname()[0])


def choose_interface(*others: str) -> None:
    """Let gloo and NCCL use the interface by which this host reaches the others, unless the user chose one."""
    reached = [mine for mine in map(own_address, others) if not ipaddress.ip_address(mine).is_loopback]
    if reached and (name := interface_of(reached[0])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this name


def interface_of(address: str) -> str | None:
    """Return the network interface of this host that has an address."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if address in {each.address for each in found}), None)

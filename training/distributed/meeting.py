"""Where the ranks of a run meet: at the address that MASTER_ADDR names, and at no other of the host.

Nothing that comes in there is encrypted, and torch's store asks nobody who he is: the network has to be trusted.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys


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


def open_store(rank: int, ranks: int, on_this_host: int) -> object:
    """Where the ranks of the process group find each other. torch would listen at every address of the host."""
    import torch

    if rank > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    port = int(os.environ["MASTER_PORT"])
    return torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listen(ranks, on_this_host, port).detach(),
    )

"""Which ranks write to one disk: all of them (`storage: shared`), or those of one host (`storage: local`).

The first rank of a disk owns the run's folder there: it holds the lease, renames finished checkpoints and removes old
ones. Checkpoints record the names of hosts, so these must stay the same between two starts.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.config.model_topo import ModelTopo
from training.distributed.processes import ProcessInfo, gather
from training.errors import RunRefused


@dataclass(frozen=True)
class Disk:
    """The disk that this rank writes to.

    Attributes:
        host: its host's name; empty if all hosts share it.
        ranks: that write to it.
        number: index of this rank among them.
    """

    host: str
    ranks: Sequence[int]
    number: int

    @classmethod
    def of(cls, storage: str, process: ProcessInfo, topology: ModelTopo) -> Disk:
        """Find the disk by the config's `storage`; all ranks call it together.

        Raises:
            RunRefused: on every rank, if two hosts have the same name, or share layers: each would have a part.
        """
        if storage == "shared":
            return cls.shared()
        found = gather((socket.gethostname(), process.local_rank == 0))
        hosts = [host for host, _ in found]
        twins = [host for host, count in Counter(host for host, first in found if first).items() if count > 1]
        if twins:
            raise RunRefused(f"storage: local: two hosts are called {twins[0]}; expected a name of its own for each")
        for group in topology.sharing("layers").tolist():
            if len(names := {hosts[rank] for rank in group}) > 1:
                raise RunRefused(
                    f"storage: local: {' and '.join(sorted(names))} share layers; expected those who do on one host, "
                    "or storage: shared"
                )
        own = hosts[process.rank]
        ranks = [rank for rank, host in enumerate(hosts) if host == own]
        return cls(own, ranks, ranks.index(process.rank))

    @classmethod
    def shared(cls) -> Disk:
        """Return the one that all hosts share."""
        return cls("", range(torch.distributed.get_world_size()), torch.distributed.get_rank())

    @property
    def owns_folder(self) -> bool:
        """Return whether this rank owns the run's folder on this disk."""
        return self.number == 0

    def name_host(self, text: str) -> str:
        """Prefix a message about this disk's folder with the host, if each has its own."""
        return f"host {self.host}: {text}" if self.host else text

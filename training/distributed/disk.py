"""Which ranks write to one disk: all of them (`storage: shared`), or those of one host (`storage: local`).

The first rank of a disk keeps the run's folder there: it holds the lease, renames finished checkpoints and removes old
ones. Hosts are identified by name, which a checkpoint records; so it has to stay the same between two starts.
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
            return cls.of_all()
        hosts = gather((socket.gethostname(), process.local_rank == 0))
        mine = hosts[process.rank][0]
        twins = [host for host, count in Counter(host for host, first in hosts if first).items() if count > 1]
        if twins:
            raise RunRefused(f"storage: local: two hosts are called {twins[0]}; expected a name of its own for each")
        for names in ({hosts[rank][0] for rank in ranks} for ranks in topology.sharing("layers").tolist()):
            if len(names) > 1:
                raise RunRefused(
                    f"storage: local: {' and '.join(sorted(names))} share layers; expected those who do on one host, "
                    "or storage: shared"
                )
        ranks = [rank for rank, (host, _) in enumerate(hosts) if host == mine]
        return cls(mine, ranks, ranks.index(process.rank))

    @classmethod
    def of_all(cls) -> Disk:
        """Return the one that all hosts share."""
        return cls("", range(torch.distributed.get_world_size()), torch.distributed.get_rank())

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps the folder."""
        return self.number == 0

    def told(self, text: str) -> str:
        """Prefix a message about this disk's folder with the host, if each has its own."""
        return f"host {self.host}: {text}" if self.host else text

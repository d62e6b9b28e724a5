"""Which ranks write to one disk: all of them (`storage: shared`), or those of one host (`storage: local`).

The first of them keeps the run's folder there: it takes the lease, names and renames checkpoints, and removes old ones.
A host is known by its name. A checkpoint records it, so it has to stay the same between two starts of a run.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.config.model_topo import ModelTopo
from training.distributed.processes import Place, gather
from training.errors import RunRefused


@dataclass(frozen=True)
class Disk:
    """The disk that this rank writes to.

    Attributes:
        host: whose disk it is; empty where all hosts share it.
        ranks: that write to it.
        number: of this rank among them, from 0.
    """

    host: str
    ranks: Sequence[int]
    number: int

    @classmethod
    def of(cls, storage: str, place: Place, topology: ModelTopo) -> Disk:
        """As the config's `storage` says; all ranks call it together.

        Raises:
            RunRefused: on every rank, where two hosts have the same name, or share layers, of which each would keep
                a part.
        """
        if storage == "shared":
            return cls.of_all()
        told = gather((socket.gethostname(), place.local_rank == 0))
        mine = told[place.rank][0]
        twins = [host for host, count in Counter(host for host, first in told if first).items() if count > 1]
        if twins:
            raise RunRefused(f"storage: local: two hosts are called {twins[0]}; expected a name of its own for each")
        for hosts in ({told[rank][0] for rank in peers} for peers in topology.sharing("layers").tolist()):
            if len(hosts) > 1:
                raise RunRefused(
                    f"storage: local: {' and '.join(sorted(hosts))} share layers; expected those who do on one host, "
                    "or storage: shared"
                )
        ranks = [rank for rank, (host, _) in enumerate(told) if host == mine]
        return cls(mine, ranks, ranks.index(place.rank))

    @classmethod
    def of_all(cls) -> Disk:
        """The one that all hosts share."""
        return cls("", range(torch.distributed.get_world_size()), torch.distributed.get_rank())

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps the folder."""
        return self.number == 0

    def told(self, text: str) -> str:
        """What a line says of this disk's folder: the host first, where each has its own."""
        return f"host {self.host}: {text}" if self.host else text

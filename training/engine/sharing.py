"""Who shares rows and layers with a process: neighbours in the grid of processes."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from models.process_groups import ALONE, Peers, Sharing
from training.config.model_topo import ModelTopo
from training.distributed.groups import among_members


def sharing_of(topology: ModelTopo) -> Sharing:
    """This process's peers; all processes call it together."""
    return Sharing(
        sequence=_peers(topology.sharing("rows")),
        tensor=_peers(topology.sharing("layers")),
    )


def _peers(groups: NDArray[Any]) -> Peers:
    """Those of the groups [groups, size] that this process is one of."""
    if (size := groups.shape[1]) == 1:
        return ALONE
    rank, own = torch.distributed.get_rank(), ALONE
    with among_members():
        for row in groups.tolist():
            group = torch.distributed.new_group(row)  # which every process counts, and its members make
            if rank in row:
                own = Peers(size, row.index(rank), group)
    return own

"""Who shares rows and layers with a process: neighbours in the grid of processes."""

from __future__ import annotations

import torch

from models.parallel.peers import ALONE, Peers, Sharing
from training.config.sections import Axis, ModelTopo
from training.distributed.groups import among_members


def sharing_of(topology: ModelTopo) -> Sharing:
    """This process's peers; all processes call it together."""
    return Sharing(
        sequence=_peers(topology, "data", topology.sequence),
        tensor=_peers(topology, "model", topology.tensor),
    )


def _peers(topology: ModelTopo, axis: Axis, size: int) -> Peers:
    """Those `size` neighbours along an axis that this process is one of."""
    if size == 1:
        return ALONE
    rank, own = torch.distributed.get_rank(), ALONE
    with among_members():
        for row in topology.along(axis).reshape(-1, size).tolist():
            group = torch.distributed.new_group(row)  # which every process counts, and its members make
            if rank in row:
                own = Peers(size, row.index(rank), group)
    return own

"""Reading the layers of a stage once for all its replicas, which send each other what they have read.

The replicas take the layers in turn. Each reads its own of the next layers while the others read theirs, so that all
hosts' connections to the disk are busy; then one layer after the other goes round, in the dtype that it trains in. All
have the bits that one has read.

Cost: for N replicas 1/N of the bytes from the disk and all of them through the network; a process holds one layer more
while it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class SharedReading:
    """This process's part of it.

    Args:
        group: the replicas.
        layers: that each of them builds, in this order.
    """

    def __init__(self, group: ProcessGroup, layers: Sequence[int]) -> None:
        self._group = group
        self._layers = list(layers)
        self._own: dict[str, Tensor] = {}

    def take(
        self, layer: int, read: Callable[[int], dict[str, Tensor]], like: dict[str, Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        """The weights of the next layer; all replicas call it together.

        Args:
            read: gives the weights of a layer, on the device.
            like: names, shapes and dtypes of this one's.
        """
        rank, replicas = self._group.rank(), self._group.size()
        place = self._layers.index(layer)
        reader = place % replicas
        if reader == 0:
            self._own = {}
            for own in self._layers[place + rank : place + rank + 1]:
                self._own = read(own)
        state = self._own if reader == rank else {}
        for name, expected in like.items():
            if reader != rank:
                state[name] = torch.empty_like(expected, device=device)
            # As bytes, as not every network knows every dtype.
            torch.distributed.broadcast(state[name].view(-1).view(torch.uint8), group=self._group, group_src=reader)
        return state

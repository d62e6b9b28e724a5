"""Which link each message takes, and for how long: `--links nvlink4,ib400 --per-host 8`.

Launchers number processes host by host, and neighbours along the last of the `axes` are neighbouring processes; so who
shares a host with whom follows from axes and dims. What goes round among the processes of a group, once for a sum's
first half and once for its second one, crosses from host to host as often as there are hosts, each time by as many
links between them as the group has processes there. What each sends to each goes by both links at a time.

Latencies are those by which NCCL chooses its algorithms (src/graph/tuning.cc, ring and simple protocol), of Ethernet an
assumption.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy

from training.config.model_topo import ModelTopo
from training.distributed.links import Link
from training.errors import ConfigError
from training.metrics.devices import GIGA, HOST_LINK, LINKED, Device

PER_HOST = 8
NVLINK = "nvlink"  # that of the device
BY_NVLINK, BY_PCIE, BY_NETWORK, BY_TCP = 3.4e-6, 5.7e-6, 9.6e-6, 3e-5  # seconds until a message is there
# GB/s in one direction for each GPU, of which a run gets `LINKED`.
_KNOWN = {
    "nvlink2": (150, BY_NVLINK),
    "nvlink3": (300, BY_NVLINK),
    "nvlink4": (450, BY_NVLINK),
    "nvlink5": (900, BY_NVLINK),
    "pcie3": (12.5, BY_PCIE),
    "pcie4": (25, BY_PCIE),
    "pcie5": (50, BY_PCIE),
    "ib100": (12.5, BY_NETWORK),
    "ib200": (25, BY_NETWORK),
    "ib400": (50, BY_NETWORK),
    "eth10": (1.25, BY_TCP),
    "eth25": (3.125, BY_TCP),
    "eth100": (12.5, BY_TCP),
}
KNOWN = {name: Link(latency=latency, bandwidth=LINKED * GIGA * speed) for name, (speed, latency) in _KNOWN.items()}


@dataclass(frozen=True)
class Group:
    """Processes that send each other what they share.

    Attributes:
        size: how many they are.
        hosts: on how many of these they are.
    """

    size: int
    hosts: int
    inside: Link
    between: Link

    @property
    def bandwidth(self) -> float:
        """Bytes/s that each process sends while something goes round."""
        if self.hosts == 1:
            return self.inside.bandwidth
        return min(self.inside.bandwidth, self.between.bandwidth * self.size / self.hosts)

    def round(self, size: float) -> float:
        """Seconds in which a tensor of so many bytes goes round once: each process sends all but its own part."""
        steps = (self.size - self.hosts) * self.inside.latency + (self.hosts - 1) * self.between.latency
        return steps + (1 - 1 / self.size) * size / self.bandwidth

    def sum(self, size: float) -> float:
        """Seconds in which all get the sum of their tensors of so many bytes."""
        return 2 * self.round(size)

    def exchange(self, size: float) -> float:
        """Seconds in which each gives each of them an equal part of so many bytes."""
        here = self.size / self.hosts
        parts = [(self.inside, (here - 1) / self.size), (self.between, (self.size - here) / self.size)]
        return max(link.seconds(share * size) for link, share in parts if share)


@dataclass(frozen=True)
class Fabric:
    """The links of a run's processes.

    Attributes:
        name: as in `--links`; of what a device has, where nobody said.
        per_host: GPUs of a host.
    """

    name: str
    inside: Link
    between: Link
    per_host: int = PER_HOST

    @classmethod
    def named(cls, text: str, device: Device, per_host: int = PER_HOST) -> Fabric:
        """As `--links` has it.

        Raises:
            ConfigError: not two links that are known.
        """
        own = Link(latency=BY_NVLINK, bandwidth=device.link)
        known = KNOWN | ({NVLINK: own} if device.link > HOST_LINK else {})
        names = [name.strip().lower() for name in text.split(",")]
        if len(names) != 2 or not known.keys() >= set(names):
            raise ConfigError(
                f"--links: {text!r}: expected the link inside of a host and the one between hosts, such as "
                f"nvlink4,ib400, of {', '.join(known)}"
            )
        if per_host < 1:
            raise ConfigError(f"--per-host: expected at least 1, found {per_host}")
        return cls(",".join(names), known[names[0]], known[names[1]], per_host)

    @classmethod
    def of(cls, device: Device) -> Fabric:
        """As if all processes were neighbours."""
        link = Link(latency=0.0, bandwidth=device.link)
        return cls("", link, link)

    def replicas(self, topo: ModelTopo) -> Group:
        """Those that run the same stage, and of its layers the same part."""
        return self._group(topo.along("data"))

    def sharing_rows(self, topo: ModelTopo) -> Group:
        """Those that have the same rows."""
        return self._group(topo.sharing("rows"))

    def sharing_layers(self, topo: ModelTopo) -> Group:
        """Those that have the same layers."""
        return self._group(topo.sharing("layers"))

    def to_next(self, topo: ModelTopo) -> list[Link]:
        """From each stage to the next one; of the processes' links the slowest."""
        ends = pairwise((topo.along("pipe") // self.per_host).T)
        return [self.between if (first != second).any() else self.inside for first, second in ends]

    def placed(self, topo: ModelTopo) -> ModelTopo:
        """In the order of axes that a run takes where its config names none (`training.distributed.placement`)."""
        if "axes" in topo.process_topology.model_fields_set or topo.processes <= self.per_host:
            return topo
        orders = topo, topo.turned()
        return min(
            orders,
            key=lambda one: (
                self.sharing_rows(one).hosts,
                self.replicas(one).hosts,
                self.to_next(one).count(self.between),
            ),
        )

    def _group(self, ranks: numpy.ndarray) -> Group:
        hosts = max(len(set(row)) for row in (ranks // self.per_host).tolist())
        return Group(ranks.shape[1], hosts, self.inside, self.between)

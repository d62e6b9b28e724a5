"""Which process holds which stage of which replica, where a run has several hosts.

Launchers number the processes host by host, and the order of `axes` says what neighbours in that row are: replicas of a
stage ([pipe, data]), or stages of a replica ([data, pipe]). Processes that share layers or rows exchange what each
block computes, replicas sum all gradients once a step, stages hand on what is computed of a micro-batch: in this order
they are to stay inside a host. Where the config says nothing of `axes`, that order is taken in which fewer groups that
share something, then fewer stages with their replicas, then fewer messages between stages cross from host to host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo

Config = TypeVar("Config", bound=TrainConfig)

SHOWN = 16  # replicas in a picture


@dataclass(frozen=True)
class Placement:
    """A run's grid of processes on its hosts.

    Attributes:
        hosts: of each rank.
    """

    topology: ModelTopo
    hosts: tuple[str, ...]

    @classmethod
    def best(cls, topology: ModelTopo, hosts: Sequence[str]) -> Placement:
        """In the order of axes that crosses hosts less, the config's own among equals."""
        orders = (cls(order, tuple(hosts)) for order in (topology, topology.turned()))
        return min(orders, key=lambda each: (sum(each.split_peers.values()), each.split_sums, each.crossings))

    @property
    def pipelines(self) -> list[list[str]]:
        """The hosts of each replica, or of one process of each stage of it where several share its layers, by stage."""
        return [[self.hosts[rank] for rank in row] for row in self.topology.along("pipe").tolist()]

    @property
    def split_peers(self) -> dict[str, int]:
        """How many groups that share layers, and rows, are on several hosts."""
        return {
            what: sum(len({self.hosts[rank] for rank in peers}) > 1 for peers in self.topology.sharing(what).tolist())
            for what in ("layers", "rows")
        }

    @property
    def split_sums(self) -> int:
        """How many stages have their replicas on several hosts."""
        return sum(len(set(hosts)) > 1 for hosts in zip(*self.pipelines, strict=True))

    @property
    def crossings(self) -> int:
        """How many pairs of neighbouring stages lie on two hosts, over all replicas."""
        return sum(first != second for row in self.pipelines for first, second in pairwise(row))

    def picture(self) -> list[str]:
        """Where each replica's stages are, and what crosses from host to host."""
        topology = self.topology
        width = max(len(f"stage {topology.stages - 1}"), *(len(host) for host in self.hosts))
        lines = ["placement:  " + "    ".join(f"{f'stage {stage}':{width}}" for stage in range(topology.stages))]
        rows, what = self.pipelines, "replica" if topology.tensor == 1 else "pipeline"
        for number, row in enumerate(rows[:SHOWN]):
            joints = [" -- " if first == second else " => " for first, second in pairwise(row)]
            cells = [f"{host:{width}}{joint}" for host, joint in zip(row, [*joints, ""], strict=True)]
            lines.append(f"{f'{what} {number}':12}{''.join(cells).rstrip()}")
        if len(rows) > SHOWN:
            lines.append(f"and {len(rows) - SHOWN} {what}s more")
        links = len(rows) * (topology.stages - 1)
        told = [f"{self.crossings} of {links} links between stages cross hosts (=>)"] if links else []
        if topology.replicas > 1:
            split = f"{self.split_sums} of {topology.stages} stages sum their replicas across hosts"
            told.append(split if self.split_sums else "replicas sum inside of their hosts")
        told += [
            f"{count} groups that share {what} lie on several hosts: every block waits for the network"
            for what, count in self.split_peers.items()
            if count
        ]
        axes = ", ".join(topology.process_topology.axes)
        return [*lines, f"{'; '.join(told)}; axes: [{axes}]"]


def place(config: Config, hosts: Sequence[str]) -> tuple[Config, list[str]]:
    """The config with the order of its axes, and a picture for the log where there are several hosts.

    Args:
        hosts: of each rank.
    """
    if len(set(hosts)) == 1:
        return config, []
    asked, best = Placement(config.model_topo, tuple(hosts)), Placement.best(config.model_topo, hosts)
    if best == asked or "axes" not in config.model_topo.process_topology.model_fields_set:
        return config.model_copy(update={"model_topo": best.topology}), best.picture()
    grid = best.topology.process_topology
    better = f"axes: [{', '.join(grid.axes)}] with dims: {grid.dims} would cross hosts less"
    return config, [*asked.picture(), better]

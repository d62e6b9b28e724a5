"""Choose which process holds which stage of which replica, where a run has several hosts.

Launchers number the processes host by host. The order of `axes` decides whether neighbours are replicas of a stage
([pipe, data]) or stages of a replica ([data, pipe]). Without `axes` in the config the run takes the order in which
fewest groups that share layers or rows cross hosts, as they communicate in every block; then fewest stages with their
replicas, which sum all gradients once a step; then fewest messages between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypeVar

from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo

Config = TypeVar("Config", bound=TrainConfig)

MOST_ROWS = 16  # replicas that the log shows


@dataclass(frozen=True)
class Placement:
    """A run's grid of processes on its hosts; `hosts` has the host of each rank."""

    topology: ModelTopo
    hosts: tuple[str, ...]

    @property
    def pipelines(self) -> list[list[str]]:
        """The hosts of each replica by stage; with a tensor axis, of one process of each stage."""
        return [list(map(self.hosts.__getitem__, row)) for row in self.topology.along("pipe").tolist()]

    @property
    def split_groups(self) -> dict[str, int]:
        """The number of groups on several hosts, of those that share layers and of those that share rows."""
        return {what: sum(map(self._spreads, self.topology.sharing(what).tolist())) for what in ("layers", "rows")}

    def _spreads(self, group: list[int]) -> bool:
        return len({self.hosts[rank] for rank in group}) > 1

    @property
    def split_sums(self) -> int:
        """The number of stages with replicas on several hosts."""
        return sum(len(set(hosts)) > 1 for hosts in zip(*self.pipelines, strict=True))

    @property
    def crossings(self) -> int:
        """The number of links between stages that cross hosts, over all replicas."""
        links = chain.from_iterable(map(pairwise, self.pipelines))
        return sum(first != second for first, second in links)

    @property
    def cost(self) -> tuple[int, int, int]:
        """What crosses hosts, the most expensive first."""
        return sum(self.split_groups.values()), self.split_sums, self.crossings

    def describe(self) -> list[str]:
        """Draw each replica's stages with their hosts, and count what crosses hosts."""
        topology, rows = self.topology, self.pipelines

        # The hosts of each replica, with an arrow between two stages that says whether they are on one host.
        width = max(len(f"stage {topology.stages - 1}"), *map(len, self.hosts))
        lines = ["placement:  " + "    ".join(f"{f'stage {stage}':{width}}" for stage in range(topology.stages))]
        kind = "replica" if topology.tensor == 1 else "pipeline"
        for number, row in enumerate(rows[:MOST_ROWS]):
            arrows = [" -- " if first == second else " => " for first, second in pairwise(row)]
            cells = [f"{host:{width}}{arrow}" for host, arrow in zip(row, [*arrows, ""], strict=True)]
            lines.append(f"{f'{kind} {number}':12}{''.join(cells).rstrip()}")
        if len(rows) > MOST_ROWS:
            lines.append(f"and {len(rows) - MOST_ROWS} {kind}s more")

        links = len(rows) * (topology.stages - 1)
        counts = [f"{self.crossings} of {links} links between stages cross hosts (=>)"] if links else []
        if topology.replicas > 1:
            split = f"{self.split_sums} of {topology.stages} stages sum their replicas across hosts"
            counts.append(split if self.split_sums else "replicas sum inside of their hosts")
        for what, count in self.split_groups.items():
            if count:
                counts.append(
                    f"{count} groups that share {what} lie on several hosts: every block waits for the network"
                )
        return [*lines, f"{'; '.join(counts)}; axes: [{', '.join(topology.process_topology.axes)}]"]


def choose_axes(config: Config, hosts: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the config with the order of its axes, and lines for the log where there are several hosts.

    Args:
        hosts: of each rank.
    """
    if len(set(hosts)) == 1:
        return config, []
    topology = config.model_topo
    asked, turned = (Placement(each, tuple(hosts)) for each in (topology, topology.turned()))
    best = min(asked, turned, key=lambda placement: placement.cost)
    if best == asked or "axes" not in topology.process_topology.model_fields_set:
        return config.model_copy(update={"model_topo": best.topology}), best.describe()
    grid = best.topology.process_topology
    better = f"axes: [{', '.join(grid.axes)}] with dims: {grid.dims} would cross hosts less"
    return config, [*asked.describe(), better]

"""How fast the processes of a run reach each other, measured as training uses them: `--check`.

A message goes from a stage to the next one, in all replicas at once; a sum goes round in the replicas of each stage, in
all stages at once. Both are tried with one number, which gives the latency, and with more and more bytes until one of
them takes `LONG_ENOUGH`, which gives the bandwidth. What comes of it lies in links.json in the run's folder, where
`--plan` and `parts: auto` find it.

Cost: half a second for each stage on a fast network, a few seconds on a slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel, Field, PositiveFloat
from torch import Tensor
from torch.distributed import ProcessGroup

from common.whole_files import Tell, kept, read_regular, replace_text
from training.config.model_topo import ModelTopo
from training.distributed.groups import among_members
from training.distributed.processes import gather

FILE = "links.json"
LONG_ENOUGH = 0.2  # seconds of a message by which the bandwidth is told
LONG_WAYS = 20  # times the latency that it takes at least: a connection starts slowly
LEAST, MOST, GROWTH = 2**18, 2**28, 4  # bytes of a message
TRIES = 5  # of which the fastest counts


class Link(BaseModel):
    """Between two stages, or among the replicas of one.

    Attributes:
        latency: seconds until a message is there, however short it is.
        bandwidth: bytes a second beyond that; of a sum, those that each process sends.
    """

    latency: Annotated[float, Field(ge=0)]
    bandwidth: PositiveFloat

    def seconds(self, size: float) -> float:
        """Of so many bytes."""
        return self.latency + size / self.bandwidth


class Links(BaseModel):
    """What was measured of a run's processes.

    Attributes:
        hosts: of each rank.
        stages: from each stage to the next one; of the replicas the slowest.
        sums: among the replicas of each stage; empty where there is one replica.
    """

    hosts: list[str]
    stages: list[Link]
    sums: list[Link]

    @classmethod
    def read(cls, folder: Path, tell: Tell) -> Links | None:
        """What an earlier `--check` left in the run's folder, if anything that can be read."""
        return kept(folder / FILE, cls.model_validate_json, read_regular, tell)

    def write(self, folder: Path) -> None:
        """Into the run's folder, whole or not at all."""
        replace_text(folder / FILE, self.model_dump_json(indent=2) + "\n")

    def fit(self, topology: ModelTopo) -> bool:
        """Whether they are those of a run with so many stages and replicas."""
        sums = topology.stages if topology.replicas > 1 else 0
        return len(self.stages) == topology.stages - 1 and len(self.sums) == sums


def measure(topology: ModelTopo, hosts: list[str]) -> Links:
    """Try the links of all processes, which call it together.

    Args:
        hosts: of each rank.
    """
    rank, held = torch.distributed.get_rank(), topology.along("pipe").T.tolist()
    own = topology.stage_of(rank)
    replica = held[own].index(rank)
    between: list[Link | None] = []
    for first, second in pairwise(held):
        ends = first[replica], second[replica]
        between.append(_of_messages(*ends) if rank in ends else None)
        torch.distributed.barrier()
    sums: list[Link | None] = []
    if topology.replicas > 1:
        with among_members():
            groups = [torch.distributed.new_group(ranks) for ranks in held]
        sums = [_of_sums(groups[own]) if stage == own else None for stage in range(topology.stages)]
    told = gather((between, sums))
    return Links(
        hosts=hosts,
        stages=[_slowest(links) for links in zip(*(each for each, _ in told), strict=True)],
        sums=[_slowest(links) for links in zip(*(each for _, each in told), strict=True)],
    )


def _of_messages(sender: int, receiver: int) -> Link:
    """From one rank to another; both call it."""
    sends = torch.distributed.get_rank() == sender
    here, there = (torch.distributed.send, torch.distributed.recv)[:: 1 if sends else -1]
    other = receiver if sends else sender

    def there_and_back(payload: Tensor) -> None:
        here(payload, other)
        there(payload[:1], other)

    def agree(seconds: Tensor) -> None:
        here(seconds, other)

    return _time(there_and_back, agree, ways=2)


def _of_sums(group: ProcessGroup) -> Link:
    """Among its ranks, which all call it."""
    largest = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX, group=group)
    link = _time(partial(torch.distributed.all_reduce, group=group), largest, ways=1)
    sent = 2 * (1 - 1 / group.size())  # times all bytes a process sends in a ring
    return link.model_copy(update={"bandwidth": sent * link.bandwidth})


def _time(exchange: Callable[[Tensor], object], agree: Callable[[Tensor], object], ways: int) -> Link:
    """What an exchange takes.

    Args:
        agree: lets a number be the same on all that take part.
        ways: how often the network is crossed; but for the first time by one number only.
    """
    device = get_accelerator().current_device_name()

    def seconds(numbers: int) -> float:
        payload = torch.zeros(numbers, device=device)
        begin = time.perf_counter()
        exchange(payload)
        payload[0].item()  # on a GPU, the host waits for the device here
        taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device)
        agree(taken)
        return float(taken)

    latency = min(seconds(1) for _ in range(TRIES)) / ways
    size = LEAST
    while (taken := seconds(size // 4)) < max(LONG_ENOUGH, LONG_WAYS * latency) and size < MOST:
        size *= GROWTH
    taken = min(taken, seconds(size // 4))
    return Link(latency=latency, bandwidth=size / max(taken - ways * latency, taken / 100))


def _slowest(links: Iterable[Link | None]) -> Link:
    found = [link for link in links if link]
    return Link(latency=max(link.latency for link in found), bandwidth=min(link.bandwidth for link in found))

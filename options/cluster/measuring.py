"""Measure the links between the processes of a run as training uses them.

Messages go from a stage to the next, in all replicas at once; all-reduces run among the replicas of each stage, in all
stages at once. A message of one number gives the latency; the first of a growing size that takes `LONG_ENOUGH` gives
the bandwidth.

Cost: half a second for each stage on a fast network, a few seconds on a slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from options.planner.links import Link, Links
from training.config.model_topo import ModelTopo
from training.distributed.communication import among_members
from training.distributed.processes import gather

LONG_ENOUGH = 0.2  # seconds of a message that measures the bandwidth
LATENCIES = 20  # or this many times the latency, as a connection starts slowly
LEAST, MOST, GROWTH = 2**18, 2**28, 4  # bytes of a message
TRIES = 5  # of which the fastest counts


def measure(topology: ModelTopo, hosts: list[str]) -> Links:
    """Measure the links of all processes, which call it together; `hosts` are those of each rank."""
    rank, by_stage = torch.distributed.get_rank(), topology.along("pipe").T.tolist()
    own = topology.stage_of(rank)
    replica = by_stage[own].index(rank)
    between: list[Link | None] = []
    for first, second in pairwise(by_stage):
        ends = first[replica], second[replica]
        between.append(_measure_messages(*ends) if rank in ends else None)
        torch.distributed.barrier()
    sums: list[Link | None] = []
    if topology.replicas > 1:
        with among_members():
            groups = [torch.distributed.new_group(ranks) for ranks in by_stage]
        sums = [_measure_sums(groups[own]) if stage == own else None for stage in range(topology.stages)]
    stages_of_ranks, sums_of_ranks = zip(*gather((between, sums)), strict=True)
    slowest_stages = list(map(_slowest, zip(*stages_of_ranks, strict=True)))
    slowest_sums = list(map(_slowest, zip(*sums_of_ranks, strict=True)))
    return Links(hosts=hosts, stages=slowest_stages, sums=slowest_sums)


def _measure_messages(sender: int, receiver: int) -> Link:
    """Measure messages between two ranks; both call it."""
    sends = torch.distributed.get_rank() == sender
    here, there = (torch.distributed.send, torch.distributed.recv)[:: 1 if sends else -1]
    other = receiver if sends else sender

    def there_and_back(payload: Tensor) -> None:
        here(payload, other)
        there(payload[:1], other)

    return _time(there_and_back, lambda seconds: here(seconds, other), ways=2)


def _measure_sums(group: ProcessGroup) -> Link:
    """Measure all-reduces of a group; its ranks all call it."""
    largest = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX, group=group)
    link = _time(partial(torch.distributed.all_reduce, group=group), largest, ways=1)
    sent = 2 * (1 - 1 / group.size())  # of all bytes, by each process in a ring
    return link.model_copy(update={"bandwidth": sent * link.bandwidth})


def _time(exchange: Callable[[Tensor], object], agree: Callable[[Tensor], object], ways: int) -> Link:
    """Time an exchange.

    Args:
        agree: makes a number the same on all ranks that take part.
        ways: how often an exchange crosses the network, after the first time with one number only.
    """
    device = get_accelerator().current_device_name()

    def seconds(numbers: int) -> float:
        payload = torch.zeros(numbers, device=device)
        begin = time.perf_counter()
        exchange(payload)
        payload[0].item()  # waits for a GPU
        taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device)
        agree(taken)
        return float(taken)

    latency = min(seconds(1) for _ in range(TRIES)) / ways
    size = LEAST
    while (taken := seconds(size // 4)) < max(LONG_ENOUGH, LATENCIES * latency) and size < MOST:
        size *= GROWTH
    taken = min(taken, seconds(size // 4))
    return Link(latency=latency, bandwidth=size / max(taken - ways * latency, taken / 100))


def _slowest(links: tuple[Link | None, ...]) -> Link:
    found = [link for link in links if link]
    return Link(latency=max(link.latency for link in found), bandwidth=min(link.bandwidth for link in found))

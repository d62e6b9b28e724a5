"""Offloaded activations come back one block ahead of their need.

A CPU's copies, which are there at once, record when they were started. `benchmarks.gpu_checks race` shows on a GPU that
the streams wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from models import offload
from models.block_options import BlockOptions
from models.offload import HostCopy, Trip
from tests.models.helpers import random_ids
from tests.models.test_block_options import BLOCKS, build, make


class Moment(NamedTuple):
    """What of which trip; micro-batches are counted from 0."""

    kind: str
    block: int
    micro_batch: int


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> list[Moment]:
    """What happens from now on: a copy starts back, or is needed."""
    found: list[Moment] = []
    micro_batches: Counter[int] = Counter()
    trips: dict[HostCopy, tuple[int, int]] = {}
    enter, send, fetched, fetch = offload.Returns.enter, Trip.send, HostCopy._fetched, Trip.fetch
    numbers: dict[Trip, int] = {}

    def entering(returns: offload.Returns, trip: Trip) -> None:
        numbers[trip] = micro_batches[trip.block]
        micro_batches[trip.block] += 1
        enter(returns, trip)

    def sending(trip: Trip, tensor: Tensor) -> HostCopy:
        copy = send(trip, tensor)
        trips[copy] = trip.block, numbers[trip]
        return copy

    def starting(copy: HostCopy) -> Tensor:
        found.append(Moment("start", *trips[copy]))
        return fetched(copy)

    def needing(trip: Trip, copy: HostCopy) -> Tensor:
        found.append(Moment("need", *trips[copy]))
        return fetch(trip, copy)

    monkeypatch.setattr(offload, "LEAST", 0)
    monkeypatch.setattr(offload.Returns, "enter", entering)
    monkeypatch.setattr(Trip, "send", sending)
    monkeypatch.setattr(Trip, "fetch", needing)
    monkeypatch.setattr(HostCopy, "_fetched", starting)
    return found


def run(folder: Path, options: BlockOptions, micro_batches: int) -> None:
    """All forward passes, then all backward passes, as a stage far from the last one has them."""
    model = build(folder, options)
    positions = torch.arange(20)[None]
    losses = [model.activations(random_ids(1, 20), positions)[0].square().sum() for _ in range(micro_batches)]
    for loss in losses:
        loss.backward()
    assert all(not block.offload._passes for block in model.blocks if block.offload)


@pytest.mark.parametrize("recompute", [frozenset[int](), frozenset({2}), BLOCKS], ids=["none", "second", "all"])
def test_one_block_is_ahead_of_the_one_in_its_backward_pass(
    recompute: frozenset[int], moments: list[Moment], make_checkpoint: Callable[..., Path]
) -> None:
    run(make("llama-tied", make_checkpoint), BlockOptions(recompute, offload=True), 3)
    order = list(dict.fromkeys(moment[1:] for moment in moments if moment.kind == "need"))
    assert order == [(block, micro_batch) for micro_batch in range(3) for block in (2, 1, 0)]
    current = -1
    for moment in moments:
        number = order.index(moment[1:])
        if moment.kind == "need":
            current = max(current, number)
        else:
            assert number == current + 1 or number == current == 0

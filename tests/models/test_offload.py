"""Offloaded activations come back one block ahead of their need.

No GPU is needed: a CPU's copies, which are there at once, record when they were started; in the last test, mocks take
the place of streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from models import offload
from models.block_options import BlockOptions
from models.offload import HostCopy, Trip
from tests.models.helpers import random_ids
from tests.models.test_block_options import BLOCKS, build


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
    recompute: frozenset[int], moments: list[Moment], make_case: Callable[..., Path]
) -> None:
    run(make_case("llama-tied"), BlockOptions(recompute, offload=True), 3)
    order = list(dict.fromkeys(moment[1:] for moment in moments if moment.kind == "need"))
    assert order == [(block, micro_batch) for micro_batch in range(3) for block in (2, 1, 0)]
    current = -1
    for moment in moments:
        number = order.index(moment[1:])
        if moment.kind == "need":
            current = max(current, number)
        else:
            assert number == current + 1 or number == current == 0


def test_the_computation_waits_for_a_copy_back_only_where_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = mock.MagicMock()  # of the streams `computing`, `out` and `back`, and of a tensor with its two copies

    def made_since() -> list[str]:
        names = [name for name, *_ in calls.mock_calls if "__" not in name]
        calls.reset_mock()
        return names

    calls.tensor.device.type, calls.tensor.detach.return_value = "cuda", calls.tensor
    monkeypatch.setattr(offload, "_stream", lambda device, way: getattr(calls, way))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: calls.computing)
    monkeypatch.setattr(torch.cuda, "stream", calls.on)
    monkeypatch.setattr(torch, "empty_like", lambda _, device, **__: calls.host if device == "cpu" else calls.device)
    copy = HostCopy(calls.tensor)
    calls.out.wait_stream.assert_called_once_with(calls.computing)
    calls.on.assert_called_once_with(calls.out)
    calls.host.copy_.assert_called_once_with(calls.tensor, non_blocking=True)
    calls.tensor.record_stream.assert_called_once_with(calls.out)  # which keeps what it reads
    begun = ["tensor.detach", "out.wait_stream", "on", "host.copy_", "out.record_event", "tensor.record_stream"]
    assert made_since() == begun

    copy.start_back()
    copy.start_back()
    calls.back.wait_stream.assert_called_once_with(calls.computing)
    calls.back.wait_event.assert_called_once_with(calls.out.record_event.return_value)
    calls.on.assert_called_once_with(calls.back)
    calls.device.copy_.assert_called_once_with(calls.host, non_blocking=True)
    calls.device.record_stream.assert_called_once_with(calls.back)
    returned = ["back.wait_stream", "back.wait_event", "on", "device.copy_", "back.record_event"]
    assert made_since() == [*returned, "device.record_stream"]

    assert copy.back() is calls.device
    calls.computing.wait_event.assert_called_once_with(calls.back.record_event.return_value)
    calls.reset_mock()
    copy.start_back()
    assert not made_since(), "what nobody needs any more came back"

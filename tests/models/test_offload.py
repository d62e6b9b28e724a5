"""Offloaded activations come back one block ahead of their need.

No GPU is needed: a CPU's copies, which are there at once, record when they were started; in the last test, streams
record what they are asked to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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


class Streams:
    """Streams and tensors of a device that is not there, and what they were given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, str]] = []
        self.current = "computing"

    def make(self, name: str) -> Any:
        streams = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                streams.given.append((name, f"wait for {other}"))

            def wait_event(self, event: str) -> None:
                streams.given.append((name, f"wait for {event}"))

            def record_event(self) -> str:
                return f"what {name} did"

            def __str__(self) -> str:
                return name

        return Stream()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, str(stream)
        yield
        self.current = before

    def tensor(self, *_: Any, **named: Any) -> Any:
        streams = self
        on_host = named.get("device") == "cpu"

        class OnDevice:
            device = torch.device("cuda")

            def detach(self) -> Any:
                return self

            def copy_(self, other: Any, non_blocking: bool) -> None:
                assert non_blocking
                streams.given.append((streams.current, "copy out" if on_host else "copy back"))

            def record_stream(self, stream: Any) -> None:
                streams.given.append((str(stream), "keeps what it reads"))

        return OnDevice()


def test_the_computation_waits_for_a_copy_back_only_where_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    made = {name: streams.make(name) for name in ("computing", "out", "back")}
    monkeypatch.setattr(offload, "_stream", lambda device, way: made[way])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made["computing"])
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch, "empty_like", streams.tensor)
    copy = HostCopy(streams.tensor())
    assert streams.given == [("out", "wait for computing"), ("out", "copy out"), ("out", "keeps what it reads")]
    streams.given.clear()
    copy.start_back()
    copy.start_back()
    assert streams.given == [
        ("back", "wait for computing"),
        ("back", "wait for what out did"),
        ("back", "copy back"),
        ("back", "keeps what it reads"),
    ]
    streams.given.clear()
    copy.back()
    assert streams.given == [("computing", "wait for what back did")]
    copy.start_back()
    assert len(streams.given) == 1, "what nobody needs any more came back"

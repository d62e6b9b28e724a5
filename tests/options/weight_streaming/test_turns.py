"""On a GPU no stream touches memory that another one still uses: of weights, of sums, and of what is handed over.

Streams keep clocks, as in test_host_sums.py. What the host waits for comes before all that it gives to any stream
later, and so does what another process has counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from options.weight_streaming import handover, streamed_model
from options.weight_streaming.handover import Handover, Places
from options.weight_streaming.streamed_model import LoadedLayers
from tests.training.engine import test_host_sums as clocks
from tests.training.engine.test_host_sums import Races, used

LAYERS, MICRO_BATCHES, SIZE = 3, 2, 8
WAITS = 4  # places in the code; `give_back` waits once more, as a count has done before


class Stream(clocks.Stream):
    all: list[Stream] = []

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.all.append(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_stream(self, other: clocks.Stream) -> None:
        for stream, time in other.clock.items():
            self.clock[stream] = max(self.clock[stream], time)


class Event(clocks.Event):
    def synchronize(self) -> None:
        for stream in Stream.all:
            stream.wait_event(self)


class AtOnce:
    """A thread that has done what it was given."""

    def submit(self, work: Any, *arguments: Any) -> Any:
        work(*arguments)
        return SimpleNamespace(done=lambda: False)


def copied(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(tensor).copy_(tensor)


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    Stream.all.clear()
    clocks.Stream.current = Stream()
    there: Any = SimpleNamespace(**vars(torch))
    there.cuda = SimpleNamespace(stream=used, current_stream=lambda _: clocks.Stream.current)
    for module in (handover, streamed_model):
        monkeypatch.setattr(module, "torch", there)
    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(handover, "_wait_for_all_but_last", lambda *_: None)  # it spares memory, and orders nothing
    return Races(clocks.Stream.current)


def room() -> Places:
    places = object.__new__(Places)
    vars(places).update(_size=64, _memory=bytearray(64 * MICRO_BATCHES))
    torch.frombuffer(places._memory, dtype=torch.float32).fill_(1)
    return places


class Turns:
    """Turns of one process at layers that each multiply with their weight, two steps' worth, in two rounds each.

    What the last layer makes in a step's first round it keeps for the second one.
    """

    def __init__(self) -> None:
        self.layers = [nn.Linear(SIZE, 1, bias=False) for _ in range(LAYERS)]
        sums = {f"{number}.weight": torch.zeros(1, SIZE) for number in range(LAYERS)}
        device = torch.device("cpu")
        self.model: Any = SimpleNamespace(layer=self.layers.__getitem__, sums=sums, head_sums=[sums], device=device)
        self.model.eight_bits = None
        self.between: Any = object.__new__(Handover)
        vars(self.between).update(arriving=Stream(), leaving=Stream(), _thread=AtOnce(), _counting=None)
        vars(self.between).update(_device=device, _reached={}, inputs=room(), products=room(), _sent=None, _used=None)

    @torch.no_grad()
    def run(self, hand_on: bool) -> None:
        """Take all turns; without `hand_on` the last layer leaves nothing at its place, as the embedding's gradient."""
        turns = [number for _ in range(4) for number in range(LAYERS)]
        loaded = [LoadedLayers(self.model, [number], self.between.arriving) for number in turns]
        for turn, number in enumerate(turns):
            loaded[turn].fetch_weights()
            loaded[turn].fetch_sums(begun=turn % (2 * LAYERS) >= LAYERS)
            loaded[turn].use()
            for place in range(MICRO_BATCHES):
                like = torch.ones(SIZE)  # the embedding's input comes with the micro-batch
                given = self.between.get(place, [like])[0] if number else like
                if place == 1 and turn + 1 < len(turns):
                    loaded[turn + 1].fetch_weights()
                weight = self.layers[number].weight
                torch.mul(given, weight[0], out=(made := torch.empty(SIZE)))
                if number + 1 == LAYERS and turn % (2 * LAYERS) < LAYERS:
                    self.between.put_products(place, [made])
                elif number + 1 == LAYERS:
                    torch.mul(made, self.between.get_products(place, [like])[0], out=(made := torch.empty(SIZE)))
                weight.grad = torch.empty(1, SIZE).copy_(made)
                loaded[turn].take_gradients(number, turn % (2 * LAYERS) < LAYERS and place == 0, scale=1.0)
                if hand_on or number + 1 < LAYERS:
                    self.between.put(place, [made])
                self.between.count(0, turn)
                if number + 1 == LAYERS and not hand_on:
                    with used(self.between.leaving):  # another process leaves something new there
                        torch.frombuffer(self.between.inputs._memory, dtype=torch.float32)[16 * place :][:SIZE].fill_(1)
            loaded[turn].give_back(self.between.leaving)
            self.between.count(1, turn)


@contextmanager
def forgetting(which: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, None]]:
    lines: dict[int, None] = {}
    wait = Stream.wait_stream

    def waiting(stream: Stream, other: Stream) -> None:
        caller = sys._getframe(1)
        if caller.f_code.co_name == "give_back":
            return wait(stream, other)
        line = hash((caller.f_code.co_filename, caller.f_lineno))
        lines[line] = None
        return wait(stream, other) if list(lines).index(line) != which else None

    with monkeypatch.context() as patched:
        patched.setattr(Stream, "wait_stream", waiting)
        yield lines


@pytest.mark.parametrize("hand_on", [True, False])
def test_streams_touch_memory_in_order(hand_on: bool, races: Races) -> None:
    turns = Turns()
    with races:
        turns.run(hand_on)
    assert not races.found
    assert all(total.abs().sum() > 0 for total in turns.model.sums.values())


@pytest.mark.parametrize("which", range(WAITS))
def test_every_wait_is_needed(which: int, races: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()
    with forgetting(which, monkeypatch) as lines, races:
        turns.run(hand_on=False)
    assert len(lines) == WAITS and races.found

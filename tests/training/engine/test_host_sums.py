"""Sums in host memory: no stream touches memory that another one still uses, and gradients do not pile up.

Streams keep clocks here, as processes do that send each other messages: an event carries its stream's clock to those
that wait for it. An access that its stream cannot know to come after another stream's to the same memory is a race.
What nobody holds any more the allocator gives to the computing stream at once, which is an access too.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend.planted import OnTheHost
from training.engine import host_sums
from training.engine.host_sums import HostSums

SIZES = 50, 7, 120, 3  # of weights; this replica owns the second in part
WAITS = 6  # places in the code


class Stream:
    """
    Attributes:
        clock: the last work of each stream that this one's next work comes after.
    """

    current: ClassVar[Stream]

    def __init__(self, *_: Any) -> None:
        self.clock: dict[Stream, int] = defaultdict(int)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock[stream], time)


class Event:
    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)


class Races(TorchDispatchMode):
    """Accesses to the same memory that are in no order."""

    def __init__(self, computing: Stream) -> None:
        super().__init__()
        self.found: list[str] = []
        self._computing = computing
        self._last: dict[int, dict[tuple[Stream, bool], int]] = defaultdict(dict)  # by address, of reads and writes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and "empty" not in str(function):
            Stream.current.clock[Stream.current] += 1
            for number, tensor in enumerate(each for each in args if isinstance(each, Tensor)):
                self.touch(str(function), Stream.current, tensor.data_ptr(), tensor.nbytes, writes=number == 0)
        return function(*args, **(kwargs or {}))

    def touch(self, what: str, stream: Stream, begin: int, size: int, writes: bool) -> None:
        for byte in range(begin, begin + size):
            known = self._last[byte]
            if any((writes or wrote) and stream.clock[other] < time for (other, wrote), time in known.items()):
                self.found.append(what)
            known[stream, writes] = stream.clock[stream]

    def free(self, begin: int, size: int) -> None:
        self.touch("free", self._computing, begin, size, writes=True)
        for byte in range(begin, begin + size):
            del self._last[byte]


@contextmanager
def used(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    Stream.current = Stream()
    there: Any = OnTheHost("empty")
    there.cuda = SimpleNamespace(Stream=Stream, Event=Event, stream=used, current_stream=lambda _: Stream.current)
    monkeypatch.setattr(host_sums, "torch", there)
    monkeypatch.setattr(host_sums, "page_locked", lambda numbers, dtype, device: torch.zeros(numbers, dtype=dtype))
    monkeypatch.setattr(host_sums, "PIECE", 16)
    monkeypatch.setattr(host_sums, "AHEAD", 200)
    return Races(Stream.current)


def summed(dtype: torch.dtype) -> tuple[Any, list[nn.Parameter]]:
    """DeepSpeed's optimizer, with sums in host memory, and its weights."""
    weights = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    owned = [50, 4, 120, 3]
    begins = numpy.cumsum([0, *owned]).tolist()
    of_device = "grad" if dtype == torch.float32 else "grad_accum"
    optimizer: Any = SimpleNamespace(
        use_grad_accum_attribute=dtype != torch.float32,
        gradient_accumulation_dtype=torch.float32,
        bit16_groups=[weights],
        single_partition_of_fp32_groups=[nn.Parameter(torch.zeros(sum(owned)))],
        get_param_id=lambda weight: [each is weight for each in weights].index(True),
        grad_position={number: [0, 0, begins[number], owned[number]] for number in range(len(SIZES))},
        _get_offload_gradient_dict=lambda: None,
        get_gradient_for_reduction=lambda weight: getattr(weight, of_device),
    )
    HostSums(optimizer, torch.device("cuda"))
    return optimizer, weights


def step(optimizer: Any, weights: list[nn.Parameter], micro_batches: int, races: Races) -> list[Tensor]:
    """Sums of random gradients, as they come back to the device; numpy's memory says when nobody holds it any more."""
    for _ in range(micro_batches):
        for weight in weights:
            memory = numpy.empty(len(weight), numpy.int32 if weight.dtype == torch.float32 else numpy.int16)
            weakref.finalize(memory, partial(races.free, memory.ctypes.data, memory.nbytes))
            weight.grad = torch.from_numpy(memory).view(weight.dtype).copy_(torch.randn(len(weight)))
            del memory
            optimizer.process_gradients(weight, 0)
    return [optimizer.get_gradient_for_reduction(weight).clone() for weight in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_exact_and_streams_touch_them_in_order(dtype: torch.dtype, races: Races) -> None:
    optimizer, weights = summed(dtype)
    for micro_batches in (3, 1, 2):
        torch.manual_seed(micro_batches)
        with races:
            found = step(optimizer, weights, micro_batches, races)
        torch.manual_seed(micro_batches)
        gradients = [[torch.randn(size).to(dtype).float() for size in SIZES] for _ in range(micro_batches)]
        expected = gradients[0]
        for each in gradients[1:]:
            expected = [total + added for total, added in zip(expected, each, strict=True)]
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert not races.found


@pytest.mark.parametrize("forgotten", range(WAITS))
def test_every_wait_is_needed(forgotten: int, races: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, weights = summed(torch.float32)
    lines: dict[int, None] = {}
    wait = Stream.wait_event

    def waiting(stream: Stream, event: Event) -> None:
        line = sys._getframe(1).f_lineno
        lines[line] = None
        if list(lines).index(line) != forgotten:
            wait(stream, event)

    monkeypatch.setattr(Stream, "wait_event", waiting)
    with races:
        step(optimizer, weights[3:], 3, races)
        step(optimizer, weights, 3, races)
    assert len(lines) == WAITS and races.found

"""Times of a step's parts, and micro-batches as they reach the engine: on a GPU in order and whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from data.loader import Loader
from data.sample_set import InMemory, Sample
from models.loss.interface import IGNORED
from training.engine import trainer as module
from training.engine.trainer import PARTS, Timings, prefetch


class Clock:
    """A clock that only the test moves."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_time_counts_for_the_innermost_part(clock: Clock) -> None:
    timings = Timings()
    with timings("forward_backward"):
        clock.now += 2
        with timings("data"):
            clock.now += 3
        clock.now += 4
        with timings("optimizer"):
            clock.now += 5
    clock.now += 100  # of no part
    with timings("checkpoint"):
        clock.now += 7
    with timings("data"):
        clock.now += 1
    assert timings.take() == {"data": 4, "forward_backward": 6, "optimizer": 5, "checkpoint": 7}
    assert timings.take() == dict.fromkeys(PARTS, 0.0)


def test_making_items_counts_and_using_them_does_not(clock: Clock) -> None:
    def slowly() -> Iterator[int]:
        for number in range(3):
            clock.now += 2
            yield number

    timings = Timings()
    with timings("forward_backward"):
        for number in timings.each("data", slowly()):
            clock.now += number
    assert timings.take() == {"data": 6, "forward_backward": 3, "optimizer": 0, "checkpoint": 0}


def test_an_error_inside_a_part_closes_it(clock: Clock) -> None:
    timings = Timings()
    with timings("forward_backward"):
        with pytest.raises(RuntimeError), timings("data"):
            clock.now += 1
            raise RuntimeError
        clock.now += 2
    assert timings.take() == {"data": 1, "forward_backward": 2, "optimizer": 0, "checkpoint": 0}


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(KeyError, match="datta"), Timings()("datta"):
        pass


SAMPLES: list[Sample] = [
    {"input_ids": list(range(3, 3 + length)), "labels": [IGNORED] * 2 + list(range(5, 3 + length))}
    for length in (9, 4, 14, 7, 2, 30)
]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="copies go to a GPU only")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_micro_batches_come_in_order_with_their_supervised_positions(device: str) -> None:
    loader = Loader(InMemory(SAMPLES), 6, 2, 1, seed=0, packing="batch", row_length=32)
    batch = loader.batch(0)
    sent = list(prefetch(loader.tensors(batch, 0), torch.device(device)))
    made = list(loader.tensors(batch, 0))
    assert len(sent) == len(made) == batch.n_micro_batches
    for (inputs, (*labels, supervised)), (expected_inputs, expected_labels) in zip(sent, made, strict=True):
        for found, expected in zip((*inputs, *labels), (*expected_inputs, *expected_labels), strict=True):
            assert found.device.type == device
            assert torch.equal(found.cpu(), expected)
        rows, length = expected_labels[0].shape
        wanted = [
            row * length + column
            for row in range(rows)
            for column in range(length - 1)
            if expected_labels[0][row, column + 1] != IGNORED
        ]
        assert supervised.tolist() == wanted

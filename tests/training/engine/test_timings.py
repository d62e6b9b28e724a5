"""Where the time goes: parts lie inside each other, and no second is counted twice. And the peak of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from tests.launching import start
from training.distributed.processes import free_port
from training.engine import timings as module
from training.engine.timings import PARTS, Timings


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

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


def test_each_take_begins_anew(clock: Clock) -> None:
    timings = Timings()
    with timings("data"):
        clock.now += 1
    timings.take()
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


def test_a_part_that_nobody_reads_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="datta"), Timings()("datta"):
        pass


def test_peak_memory_is_this_process_s_and_not_its_parent_s() -> None:
    """A small child of a large process is small; getrusage would say otherwise."""
    ballast = bytearray(600_000_000)
    ballast[::4096] = b"1" * len(ballast[::4096])
    code = "from training.metrics.peak_memory import peak_memory as p\n"
    code += "a = p(); b = b'1' * 100_000_000; del b; print(a, p())"
    stub = "import sys, types; t = sys.modules['torch'] = types.ModuleType('torch')\n"
    stub += "t.cuda = types.SimpleNamespace(is_initialized=lambda: False)\n"
    output = subprocess.run(
        [sys.executable, "-c", stub + code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    first, second = map(int, output.split())
    assert first < 100_000_000
    assert 90_000_000 < second - first < 120_000_000


RANK = """
import sys
from torch import distributed, ones
from training.metrics.peak_memory import peak_memory, peak_memory_by_stage
rank, port = map(int, sys.argv[1:])
distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
ones(40_000_000 * (rank + 1))  # four bytes each, freed at once
print(peak_memory(), *peak_memory_by_stage(stage=min(rank, 1), stages=2))
distributed.destroy_process_group()
"""


def test_all_ranks_learn_the_largest_process_of_each_stage() -> None:
    port = str(free_port())
    launches = [start(sys.executable, "-c", RANK, str(rank), port) for rank in range(3)]
    told = [list(map(int, launch.end().stdout.split())) for launch in launches]
    (first, *peaks), (second, *_), (third, *_) = told
    assert peaks[0] == pytest.approx(first, rel=0.02)
    assert peaks[1] == pytest.approx(max(second, third), rel=0.02)
    assert peaks[1] > peaks[0] + 200_000_000
    assert all(rest == peaks for _, *rest in told)

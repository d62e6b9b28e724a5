"""Ways of a benchmark wait in processes of their own, stopped, and step in turn; one that fails is shown."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.report import run_parts
from benchmarks.workers import Turn, Turns

MODULE = "tests.benchmarks.test_workers"


def step(folder: Path, fails: bool) -> None:
    """The worker."""
    turn = Turn(folder)
    while turn.wait():
        if fails:
            sys.exit("no such thing")
        turn.done(0.5, 5, at=time.monotonic())


def test_ways_step_in_turn(tmp_path: Path) -> None:
    with Turns(tmp_path) as turns:
        for name in ("one", "other"):
            turns.add(name, None, MODULE, "step", fails=False)
        turns.rounds(3)
    one, other = ([each["at"] for each in way.steps] for way in turns.ways.values())
    moments = [moment for pair in zip(one[1:], other[1:], strict=True) for moment in pair]
    assert len(moments) == 6 and moments == sorted(moments)
    assert (turns.speed("one"), turns.ratio("one", "other")) == (10, 1)


def test_a_way_that_fails_is_shown(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)failed:.*no such thing"), Turns(tmp_path) as turns:
        turns.add("one", None, MODULE, "step", fails=True)


if __name__ == "__main__":
    run_parts("", {}, {"step": step})

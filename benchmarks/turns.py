"""Ways to train that are all ready at once and make their steps in turn.

A machine that others use too can be a fifth slower from one minute to the next. Runs that follow each other compare
minutes; here each way waits in processes of its own, idle, until it is asked for one step, so that steps are compared
that ran seconds apart, and the median of several rounds counts. Asking and answering go through files.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from benchmarks.ranks import Workers

READY, STOP = "ready", "stop"


class Pace(Protocol):
    """When a way to train makes its steps, and where it tells what they took."""

    def wait(self) -> bool:
        """Until the next step shall begin; False where none shall."""

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        """Tell a step's seconds and its tokens that are not padding."""


class Turn:
    """A worker's side: makes a step whenever it is asked for one.

    Args:
        folder: of this way alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def wait(self) -> bool:
        asked = self._folder / f"asked-{self._number}"
        (self._folder / READY).touch()
        while not asked.exists():
            if (self._folder / STOP).exists() or not self._folder.exists():
                return False
            time.sleep(0.002)
        return True

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            whole = self._folder / "writing"
            whole.write_text(json.dumps({"seconds": seconds, "tokens": tokens, **more}), encoding="utf-8")
            whole.rename(self._folder / f"done-{self._number}")
        self._number += 1


class Straight:
    """The steps one after the other.

    Attributes:
        speeds: tokens per second of the steps so far.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.speeds: list[float] = []

    def wait(self) -> bool:
        return len(self.speeds) < self._left

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        self.speeds.append(tokens / seconds)


class Turns:
    """The asking side; leaving it ends all workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: dict[str, Workers] = {}
        self._groups: list[list[str]] = []
        self._steps: dict[str, list[dict[str, Any]]] = {}

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, workers in self._workers.items():
            (self._folder / name / STOP).touch()
            if kind is None:
                workers.wait()

    def add(self, name: str, module: str, processes: int | None, *words: str, beside: bool = False) -> float:
        """Start a way and let it make a step to warm up.

        Args:
            words: more for its command line, after `--folder`, the folder of its `Turn`.
            beside: its steps are made at the same time as those of the way that was added before.

        Returns:
            The seconds until the first step began.
        """
        begin = time.monotonic()
        (self._folder / name).mkdir(parents=True)
        self._workers[name] = Workers(processes, module, self._folder / name, *words)
        self._groups += [] if beside else [[]]
        self._groups[-1].append(name)
        self._steps[name] = []
        self._wait_for(name, READY)
        seconds = time.monotonic() - begin
        self._ask([name])
        return seconds

    def rounds(self, number: int) -> None:
        """Let every way make so many steps, in turn."""
        for _ in range(number):
            for group in self._groups:
                self._ask(group)

    def steps(self, name: str) -> list[dict[str, Any]]:
        """What the steps of a way took, the first left out."""
        return self._steps[name][1:]

    def seconds(self, name: str) -> float:
        """Of a step: the median."""
        return statistics.median(step["seconds"] for step in self.steps(name))

    def speed(self, name: str) -> float:
        """Tokens per second: the median."""
        return statistics.median(speeds(self.steps(name)))

    def ratio(self, name: str, other: str) -> float:
        """How many times as fast one way is as another: the median of the rounds."""
        pairs = zip(speeds(self.steps(name)), speeds(self.steps(other)), strict=True)
        return statistics.median(one / another for one, another in pairs)

    def _ask(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name / f"asked-{len(self._steps[name])}").touch()
        for name in names:
            told = self._wait_for(name, f"done-{len(self._steps[name])}")
            self._steps[name].append(json.loads(told.read_text(encoding="utf-8")))

    def _wait_for(self, name: str, file: str) -> Path:
        path = self._folder / name / file
        while not path.exists():
            assert self._workers[name].working(), f"{name} has left"
            time.sleep(0.002)
        return path


def speeds(steps: Iterable[dict[str, Any]]) -> list[float]:
    """Tokens per second."""
    return [step["tokens"] / step["seconds"] for step in steps]

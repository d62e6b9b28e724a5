"""Ways to train that are all ready at once and make their steps in turn.

A machine that others use too can be a fifth slower from one minute to the next. Runs that follow each other compare
minutes; here each way waits in processes of its own until it is asked for one step, so that steps are compared that ran
seconds apart, and the median of several rounds counts. Asking and answering are lines of JSON through a socket.

Who waits is stopped (SIGSTOP), not only idle: gloo's threads look for messages a hundred times a second, and ten such
processes take a tenth of a core from whoever makes a step.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from benchmarks.ranks import Workers

PORT = "port"  # the file that tells a way's workers where they are waited for
HERE = "127.0.0.1"


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
        port = int((folder / PORT).read_text(encoding="utf-8"))
        self._rank = int(os.environ.get("RANK", "0"))
        self._line = socket.create_connection((HERE, port)).makefile("rw", encoding="utf-8")

    def wait(self) -> bool:
        say(self._line, {"rank": self._rank, "pid": os.getpid()})
        return bool(self._line.readline())  # empty where nobody asks any more

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        if self._rank == 0:
            say(self._line, {"seconds": seconds, "tokens": tokens, **more})


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


class Way:
    """Processes that train in one way, and the lines to them.

    Args:
        processes: see `benchmarks.ranks.Workers`.
    """

    def __init__(self, folder: Path, module: str, processes: int | None, *words: str) -> None:
        folder.mkdir(parents=True)
        self.steps: list[dict[str, Any]] = []
        with socket.create_server((HERE, 0)) as server:
            (folder / PORT).write_text(str(server.getsockname()[1]), encoding="utf-8")
            self._workers = Workers(processes, module, folder, *words)
            server.settimeout(1)
            self._lines = [self._accept(server) for _ in range(processes or 1)]
        ready = [(self._hear(line), line) for line in self._lines]
        ready.sort(key=lambda each: int(each[0]["rank"]))
        self._lines = [line for _, line in ready]
        self._processes = [int(worker["pid"]) for worker, _ in ready]

    def ask(self) -> None:
        """Let the step begin."""
        self._signal(signal.SIGCONT)
        for line in self._lines:
            say(line, "go")

    def take(self) -> None:
        """Wait for the step's end, and until all are ready for the next."""
        self.steps.append(self._hear(self._lines[0]))
        for line in self._lines:
            self._hear(line)
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Let the processes leave."""
        self._signal(signal.SIGCONT)
        for line in self._lines:
            line.close()

    def wait(self) -> None:
        """Until they have left."""
        self._workers.wait()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # it has failed, which is found out elsewhere
                os.kill(process, number)

    def _accept(self, server: socket.socket) -> TextIO:
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                self._workers.check()
                continue
            with connection:  # the file keeps it open
                connection.settimeout(None)
                return connection.makefile("rw", encoding="utf-8")

    def _hear(self, line: TextIO) -> Any:
        told = line.readline()
        if not told:
            self._workers.wait()
        return json.loads(told)


class Turns:
    """The asking side; leaving it ends all workers.

    Args:
        folder: each way gets one of its own in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ways: dict[str, Way] = {}
        self._groups: list[list[Way]] = []

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for way in self._ways.values():
            way.end()
        if kind is None:
            for way in self._ways.values():
                way.wait()

    def add(self, name: str, module: str, processes: int | None, *words: str, beside: bool = False) -> float:
        """Start a way and let it make a step to warm up.

        Args:
            words: more for its command line, after `--folder`, the folder of its `Turn`.
            beside: its steps are made at the same time as those of the way that was added before.

        Returns:
            The seconds until the first step could begin.
        """
        begin = time.monotonic()
        way = self._ways[name] = Way(self._folder / name, module, processes, *words)
        seconds = time.monotonic() - begin
        self._groups += [] if beside else [[]]
        self._groups[-1].append(way)
        way.ask()
        way.take()
        return seconds

    def rounds(self, number: int) -> None:
        """Let every way make so many steps, in turn."""
        for _ in range(number):
            for group in self._groups:
                for way in group:
                    way.ask()
                for way in group:
                    way.take()

    def steps(self, name: str) -> list[dict[str, Any]]:
        """What the steps of a way took, the first left out."""
        return self._ways[name].steps[1:]

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


def say(line: TextIO, told: Any) -> None:
    """Send something."""
    line.write(json.dumps(told) + "\n")
    line.flush()


def speeds(steps: Iterable[dict[str, Any]]) -> list[float]:
    """Tokens per second."""
    return [step["tokens"] / step["seconds"] for step in steps]

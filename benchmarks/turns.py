"""Let ways to train wait beside each other and step in turn.

A machine that others use too can be a fifth slower from one minute to the next. Here each way waits in its own
processes until it is asked for a step, so that steps are compared that ran seconds apart; the median counts.

A waiting process is stopped (SIGSTOP): gloo's threads poll a hundred times a second, and ten such processes take a
tenth of a core from the one that works.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from benchmarks.ranks import Workers

PORT = "port"  # the file that tells a way's workers where to connect
HERE = "127.0.0.1"


class Turn:
    """A worker's side: the `Pace` that makes a step whenever it is asked for one.

    Args:
        folder: of this way alone.
    """

    def __init__(self, folder: Path) -> None:
        port = int((folder / PORT).read_text(encoding="utf-8"))
        self._rank = int(os.environ.get("RANK", "0"))
        self._line = socket.create_connection((HERE, port)).makefile("rw", encoding="utf-8")

    def wait(self) -> bool:
        say(self._line, {"rank": self._rank, "pid": os.getpid()})
        return bool(self._line.readline())  # empty once the asking side has left

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        if self._rank == 0:
            say(self._line, {"seconds": seconds, "tokens": tokens, **more})


class Way:
    """Processes that train in one way; see `benchmarks.ranks.Workers`."""

    def __init__(self, folder: Path, processes: int | None, module: str, work: str, given: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.steps: list[dict[str, Any]] = []
        begin = time.monotonic()
        with socket.create_server((HERE, 0)) as server:
            (folder / PORT).write_text(str(server.getsockname()[1]), encoding="utf-8")
            self.workers = Workers(processes, module, folder, work, given)
            server.settimeout(1)
            lines = [self._accept(server) for _ in range(processes or 1)]
        ready = sorted(((self._hear(line), line) for line in lines), key=lambda each: int(each[0]["rank"]))
        self.startup = time.monotonic() - begin
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

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # it has failed, which the next line says
                os.kill(process, number)

    def _accept(self, server: socket.socket) -> TextIO:
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                self.workers.check()
                continue
            with connection:  # the file keeps it open
                connection.settimeout(None)
                return connection.makefile("rw", encoding="utf-8")

    def _hear(self, line: TextIO) -> Any:
        told = line.readline()
        if not told:
            self.workers.wait()
        return json.loads(told)


class Turns:
    """The asking side; leaving it ends all workers.

    Args:
        folder: each way gets a folder of its own in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ways: dict[str, Way] = {}
        self._groups: list[list[Way]] = []

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for way in self.ways.values():
            way.end()
        if kind is None:
            for way in self.ways.values():
                way.workers.wait()

    def add(self, name: str, processes: int | None, module: str, work: str, beside: bool = False, **given: Any) -> None:
        """Start a way and let it make a step to warm up.

        Args:
            beside: its steps run at the same time as those of the way added before.
        """
        way = self.ways[name] = Way(self._folder / name, processes, module, work, given)
        self._groups += [] if beside else [[]]
        self._groups[-1].append(way)
        way.ask()
        way.take()

    def rounds(self, number: int) -> None:
        """Let every way make N steps, in turn."""
        for _ in range(number):
            for group in self._groups:
                for way in group:
                    way.ask()
                for way in group:
                    way.take()

    def median(self, name: str, figure: str) -> float:
        """Return the median of a figure over a way's steps, without the first."""
        return statistics.median(step[figure] for step in self.ways[name].steps[1:])

    def speed(self, name: str) -> float:
        """Return the median tokens per second."""
        return statistics.median(self._speeds(name))

    def ratio(self, name: str, other: str) -> float:
        """Return how many times as fast one way is as another, by round."""
        pairs = zip(self._speeds(name), self._speeds(other), strict=True)
        return statistics.median(one / another for one, another in pairs)

    def _speeds(self, name: str) -> list[float]:
        return [step["tokens"] / step["seconds"] for step in self.ways[name].steps[1:]]


def say(line: TextIO, told: Any) -> None:
    line.write(json.dumps(told) + "\n")
    line.flush()

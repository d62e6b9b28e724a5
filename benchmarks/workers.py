"""Start a benchmark's workers, take their figures, and let several ways to train step in turn.

A worker is a function of the benchmark's own module (`benchmarks.report.run_parts`); it leaves its figures with
`write_figures`.

A machine that others use too can be a fifth slower from one minute to the next. So the ways to train that are compared
wait beside each other, each in its own processes, and make one step in turn (`Turns`): steps are compared that ran
seconds apart, and the median counts. A waiting process is stopped (SIGSTOP): gloo's threads poll a hundred times a
second, and ten such processes take a tenth of a core from the one that works.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = "result.json"
END = "end"  # when this file is there, workers leave
LOOK = 0.02  # seconds between two looks at waiting workers


class Workers:
    """A worker in N processes through the launcher or, without a number, in one process without ranks.

    Args:
        python: of the environment to run in; this process's where absent.
    """

    def __init__(
        self,
        processes: int | None,
        module: str,
        folder: Path,
        work: str,
        given: dict[str, Any],
        python: Path | None = None,
    ) -> None:
        words = ["--folder", str(folder), "--work", work, "--given", json.dumps(given)]
        self._command = [*command(processes, module), *words]
        if python:
            self._command[0] = str(python)
        self._printed = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment(), stdout=self._printed, stderr=subprocess.STDOUT
        )

    def check(self) -> None:
        """Exit with their output where one has failed."""
        if self._process.poll():
            self._printed.seek(0)
            sys.exit(f"{' '.join(self._command)} failed:\n{self._printed.read()}")

    def wait(self) -> None:
        """Wait until all have ended."""
        self._process.wait()
        self.check()


def command(processes: int | None, module: str, visible: str = "") -> list[str]:
    """Make the command that starts a module; see `Workers`.

    Args:
        visible: the GPUs to take the first of, as in CUDA_VISIBLE_DEVICES; where absent any.
    """
    if not processes:
        return [sys.executable, "-m", module]
    from training.launch.agent import free_port  # what a bare machine may not have yet

    numbers = ",".join(visible.split(",")[:processes])
    where = ["--include", f"localhost:{numbers}"] if visible else ["--num_gpus", str(processes)]
    launcher = ["deepspeed.launcher.runner", *where, "--master_port", str(free_port())]
    return [sys.executable, "-m", *launcher, "--module", module]


def environment() -> dict[str, str]:
    """Copy the environment, with the root first in PYTHONPATH."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def run_workers(processes: int | None, module: str, folder: Path, work: str, **given: Any) -> Any:
    """Run a worker to its end; return the figures of rank 0."""
    Workers(processes, module, folder, work, given).wait()
    return json.loads((folder / RESULT).read_text(encoding="utf-8"))


def write_figures(folder: Path, found: Any) -> None:
    """Leave the figures, on rank 0 or without ranks."""
    if os.environ.get("RANK", "0") == "0":
        (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")


class Turn:
    """A worker's side: the `Pace` that makes a step whenever the benchmark lets it.

    Every rank writes a file: a line with its process, then one for each step.
    """

    def __init__(self, folder: Path) -> None:
        self._end = folder / END
        self._file = open(_steps_file(folder, int(os.environ.get("RANK", "0"))), "w", encoding="utf-8", buffering=1)
        print(os.getpid(), file=self._file)

    def wait(self) -> bool:
        signal.raise_signal(signal.SIGSTOP)
        return not self._end.exists()

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        print(json.dumps({"seconds": seconds, "tokens": tokens, **more}), file=self._file)


class Way:
    """The benchmark's side: processes that train in one way; see `Workers`."""

    def __init__(
        self,
        folder: Path,
        processes: int | None,
        module: str,
        work: str,
        given: dict[str, Any],
        python: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.steps: list[dict[str, Any]] = []
        self._end = folder / END
        self._files = [_steps_file(folder, rank) for rank in range(processes or 1)]
        begin = time.monotonic()
        self.workers = Workers(processes, module, folder, work, given, python)
        self._lines_of_all(1)
        self.startup = time.monotonic() - begin

    def go(self) -> None:
        """Let the step begin."""
        for file in self._files:
            with suppress(OSError, IndexError):  # one that has failed is reported by `take`
                os.kill(_process_of(file), signal.SIGCONT)

    def take(self) -> None:
        """Wait until all ranks have made the step and stand again."""
        self.steps.append(json.loads(self._lines_of_all(len(self.steps) + 2)[0][-1]))

    def end(self) -> None:
        """Let the processes leave."""
        self._end.touch()
        self.go()

    def _lines_of_all(self, number: int) -> list[list[str]]:
        while True:
            self.workers.check()
            with suppress(OSError, IndexError):  # one that does not wait yet
                found = [file.read_text(encoding="utf-8").splitlines() for file in self._files]
                if all(len(lines) == number and _stands(int(lines[0])) for lines in found):
                    return found
            time.sleep(LOOK)


def _steps_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def _process_of(file: Path) -> int:
    return int(file.read_text(encoding="utf-8").splitlines()[0])


def _stands(process: int) -> bool:
    """Say whether a process is stopped."""
    return Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "T"


class Turns:
    """Several ways that step in turn; leaving it ends all workers.

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

    def add(
        self,
        name: str,
        processes: int | None,
        module: str,
        work: str,
        beside: bool = False,
        python: Path | None = None,
        **given: Any,
    ) -> None:
        """Start a way and let it make a step to warm up.

        Args:
            beside: its steps run at the same time as those of the way added before.
            python: as of `Workers`.
        """
        way = self.ways[name] = Way(self._folder / name, processes, module, work, given, python)
        self._groups += [] if beside else [[]]
        self._groups[-1].append(way)
        way.go()
        way.take()

    def rounds(self, number: int) -> None:
        """Let every way make N steps, in turn."""
        for _ in range(number):
            for group in self._groups:
                for way in group:
                    way.go()
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

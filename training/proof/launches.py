"""Start a run as a user does, with its launcher and processes, and kill all of them at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from common.parent import end_with_this_process, without_sigterm
from training.errors import RunRefused
from training.metrics.reporter import METRICS_FILE, read_metrics
from training.proof.recorder import HELD, HOLD

POLL = 0.05  # seconds
MAX_ERROR = 300  # characters of a run's error message


@dataclass(frozen=True)
class Start:
    """What starts a run of the proof.

    Attributes:
        script: path of the entry point.
        config: the YAML file.
        folder: its `save_path`.
        notes: where its ranks record their steps.
    """

    script: str
    config: Path
    folder: Path
    notes: Path

    def steps_noted(self) -> int:
        """Count the steps that rank 0 has completed."""
        return len(list(self.notes.glob("step-*.rank-0.safetensors")))


class Launch:
    """A running run."""

    def __init__(self, start: Start) -> None:
        self._start, self._output = start, start.notes / "output"
        words = [sys.executable, start.script, "--config", str(start.config), "--record", str(start.notes)]
        with open(self._output, "ab") as output, without_sigterm():
            start_alone = partial(subprocess.Popen, words, stdin=subprocess.DEVNULL, start_new_session=True)
            self._process = start_alone(stdout=output, stderr=subprocess.STDOUT, preexec_fn=end_with_this_process())

    def wait_until(self, condition: Callable[[], object], show: Callable[[int], None]) -> None:
        """Wait until a condition holds.

        Args:
            show: takes the number of completed steps, repeatedly.

        Raises:
            RunRefused: the run ended before.
        """
        while not condition():
            if self._process.poll() is not None and not condition():
                raise RunRefused(f"the small run ended with exit code {self._process.returncode}: {self._last_error()}")
            show(self._start.steps_noted())
            time.sleep(POLL)
        show(self._start.steps_noted())

    def is_done(self) -> bool:
        """Whether the run ended with exit code 0."""
        return self._process.poll() == 0

    def is_on_hold(self) -> bool:
        """Whether the run waits in the middle of a step."""
        return (self._start.notes / HELD).exists()

    def kill(self) -> None:
        """Send SIGKILL to all processes of the run, and wait for them."""
        if self._process.poll() is not None:
            return
        launcher = psutil.Process(self._process.pid)
        family = [*launcher.children(recursive=True), launcher]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family)
        self._process.wait()

    def _last_error(self) -> str:
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["no output"])[-1][:MAX_ERROR]


@contextmanager
def launch_run(start: Start, hold: int = 0) -> Iterator[Launch]:
    """Start a run, and kill it at the end of the block.

    Args:
        hold: step in the middle of which it waits to be killed; 0 for none.
    """
    start.notes.mkdir(exist_ok=True)
    (start.notes / HOLD).write_text(str(hold))
    launch = Launch(start)
    try:
        yield launch
    finally:
        launch.kill()


def read_numbers(run: Path) -> dict[str, dict[int, float]]:
    """Read losses and norms of a run: name -> step -> number."""
    found: dict[str, dict[int, float]] = {"loss": {}, "grad_norm": {}, "eval_loss": {}}
    for values in read_metrics(run / METRICS_FILE):
        for name, by_step in found.items():
            if values.get(name) is not None:
                by_step[values["step"]] = values[name]
    return found

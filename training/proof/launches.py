"""Starting the door itself as a user does, with its launcher and its processes, and killing all of them at once."""

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

from common.parent import together
from training.errors import RunRefused
from training.metrics.reporter import METRICS_FILE, read_metrics
from training.proof.recorder import HELD, HOLD

LOOK = 0.05  # seconds between two looks
TOLD = 300  # characters of a run's last words


@dataclass(frozen=True)
class Start:
    """How a run of the proof is started.

    Attributes:
        door: the script.
        config: the YAML file.
        folder: its `save_path`.
        notes: where its ranks note their steps.
    """

    door: str
    config: Path
    folder: Path
    notes: Path

    def steps_noted(self) -> int:
        """How many steps rank 0 has done."""
        return len(list(self.notes.glob("step-*.rank-0.safetensors")))


class Launch:
    """A run that is under way."""

    def __init__(self, start: Start) -> None:
        self._start, self._output = start, start.notes / "output"
        words = [sys.executable, start.door, "--config", str(start.config), "--record", str(start.notes)]
        with open(self._output, "ab") as output:
            start_alone = partial(subprocess.Popen, words, stdin=subprocess.DEVNULL, start_new_session=True)
            self._process = start_alone(stdout=output, stderr=subprocess.STDOUT, preexec_fn=together())

    def until(self, over: Callable[[], object], shown: Callable[[int], None]) -> None:
        """Wait for something that the run brings about.

        Args:
            shown: told how many steps are done, again and again.

        Raises:
            RunRefused: it ended before.
        """
        while not over():
            if self._process.poll() is not None and not over():
                raise RunRefused(f"the small run ended with exit code {self._process.returncode}: {self._last_words()}")
            shown(self._start.steps_noted())
            time.sleep(LOOK)
        shown(self._start.steps_noted())

    def ended(self) -> bool:
        """Whether it did all that it had to."""
        return self._process.poll() == 0

    def held(self) -> bool:
        """Whether it waits in the midst of a step."""
        return (self._start.notes / HELD).exists()

    def kill(self) -> None:
        """SIGKILL for every process of it."""
        if self._process.poll() is not None:
            return
        launcher = psutil.Process(self._process.pid)
        family = [*launcher.children(recursive=True), launcher]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family)
        self._process.wait()

    def _last_words(self) -> str:
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it said nothing"])[-1][:TOLD]


@contextmanager
def launched(start: Start, hold: int = 0) -> Iterator[Launch]:
    """A run that ends with the block, at the latest.

    Args:
        hold: the step in the midst of which it waits for its end, if any.
    """
    start.notes.mkdir(exist_ok=True)
    (start.notes / HOLD).write_text(str(hold))
    launch = Launch(start)
    try:
        yield launch
    finally:
        launch.kill()


def metrics(run: Path) -> dict[str, dict[int, float]]:
    """The numbers of a run by name and step."""
    found: dict[str, dict[int, float]] = {"loss": {}, "grad_norm": {}, "eval_loss": {}}
    for values in read_metrics(run / METRICS_FILE):
        for name, of_step in found.items():
            if values.get(name) is not None:
                of_step[values["step"]] = values[name]
    return found

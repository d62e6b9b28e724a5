"""Start a run as a user does, with its launcher and processes, and kill all of them at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from common.parent import end_with_this_process, without_sigterm
from options.proof.recorder import HELD, HOLD
from training.errors import RunRefused
from training.metrics.reporter import METRICS_FILE, read_metrics

POLL = 0.05  # seconds
MAX_ERROR = 300  # characters of a run's error message


@dataclass(frozen=True)
class LaunchedRun:
    """A run of the proof that can be started, and started again to resume.

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

    def run(self, show: Callable[[int], None], hold: int = 0) -> None:
        """Run to the end, or until it waits in the middle of step `hold`, and kill it there.

        Args:
            show: takes the number of completed steps, repeatedly.

        Raises:
            RunRefused: the run failed.
        """
        self.notes.mkdir(exist_ok=True)
        (self.notes / HOLD).write_text(str(hold))
        output = self.notes / "output"
        words = [sys.executable, self.script, "--config", str(self.config), "--record", str(self.notes)]
        process: subprocess.Popen[str] | None = None
        try:
            with open(output, "ab") as file, without_sigterm():
                start_alone = partial(subprocess.Popen, words, stdin=subprocess.DEVNULL, start_new_session=True)
                process = start_alone(stdout=file, stderr=subprocess.STDOUT, preexec_fn=end_with_this_process())
            while not (hold and (self.notes / HELD).exists()):
                code = process.poll()
                show(len(list(self.notes.glob("step-*.rank-0.pt"))))
                if code == 0 and not hold:
                    return
                if code is not None:
                    raise RunRefused(f"the small run ended with exit code {code}: {_last_error(output)}")
                time.sleep(POLL)
        finally:
            if process is not None:
                _kill(process)

    def read_numbers(self, more: Sequence[str] = ()) -> dict[str, dict[int, float]]:
        """Read losses, norms and `more` numbers: name -> step -> number."""
        found: dict[str, dict[int, float]] = {name: {} for name in ("loss", "grad_norm", "eval_loss", *more)}
        for values in read_metrics(self.folder / METRICS_FILE):
            for name, by_step in found.items():
                if values.get(name) is not None:
                    by_step[values["step"]] = values[name]
        return found


def _kill(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to all processes of a run, and wait for them."""
    if process.poll() is not None:
        return
    launcher = psutil.Process(process.pid)
    family = [*launcher.children(recursive=True), launcher]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family)
    process.wait()


def _last_error(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:MAX_ERROR]

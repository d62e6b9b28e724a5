"""What a run reports while it runs: lines or a live view for people, metrics.jsonl for programs, curves for trackers.

Rank 0 appends one JSON line after each optimizer step and one after each evaluation; the other ranks do nothing. A run
that goes on at step N first cuts away the lines of step N and later, as it repeats those steps, and what a kill left of
a last line. So each step has one line, however often the run was interrupted. Numbers that are not finite become null:
JSON has no NaN. Neither a full disk nor a tracker that fails ends a run; both are reported once.

A step's bookkeeping takes 0.1 ms, with TensorBoard 0.9 ms.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from common.terminal import safe_line
from common.whole_files import regular, replacing
from training.metrics.step_metrics import StepMetrics, to_json

if TYPE_CHECKING:  # reading a run's metrics needs neither torch nor a config
    from training.metrics.live_view import LiveView
    from training.metrics.tracking import Tracker

METRICS_FILE = "metrics.jsonl"


@dataclass
class Reporter:
    """Writes metrics.jsonl, shows progress and feeds the trackers; on ranks other than 0 it does nothing.

    Attributes:
        active: whether this is the rank that reports.
        steps_per_print: how often a line is printed where there is no live view.
        first_step: the step that comes next; above 1 when the run goes on.
        trackers: what else takes the numbers; the reporter closes them.
        evaluates_first: whether the evaluation after the step before `first_step` comes first.
        parts: layers of each stage.
    """

    folder: Path
    total_steps: int
    active: bool
    steps_per_print: int
    first_step: int = 1
    trackers: Sequence[Tracker] = ()
    evaluates_first: bool = False
    parts: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._working = list(self.trackers)
        self._begin = time.monotonic()
        self._unwritten = b""
        self._disk_failed = False
        if self.active:
            path = self.folder / METRICS_FILE
            cut(path, self.first_step, self.evaluates_first)
            self._file = open(path, "ab", buffering=0)
            self._view = live_view(self.total_steps, self.parts)

    def report(self, metrics: StepMetrics) -> None:
        """Record one step."""
        if not self.active:
            return
        self._record(asdict(metrics))
        a_step = (time.monotonic() - self._begin) / (metrics.step - self.first_step + 1)
        left = tqdm.format_interval(a_step * (self.total_steps - metrics.step))
        if self._view:
            self._view.show(metrics, left)
        elif metrics.step % self.steps_per_print == 0 or metrics.step == self.total_steps:
            numbers = f"loss {metrics.loss:.4f}  grad_norm {metrics.grad_norm:.3f}  lr {metrics.lr:.2e}"
            speed = f"{metrics.tokens_per_s:,.0f} tokens/s"
            if metrics.mfu is not None:
                speed += f"  MFU {metrics.mfu:.0%}"
            progress = f"step {metrics.step}/{self.total_steps}  epoch {metrics.epoch}"
            print(f"{progress}  {numbers}  {speed}  {left} left", flush=True)

    def report_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record an evaluation after `step`: `eval_loss`, `eval_perplexity`, `eval_loss/<type of record>`."""
        if not self.active:
            return
        self._record({"step": step, **numbers})
        text = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        print(f"step {step}/{self.total_steps}  {text}", flush=True)

    def _record(self, values: dict[str, Any]) -> None:
        self._write(to_json(values) + b"\n")
        numbers = flatten({name: value for name, value in values.items() if name != "step"})
        for tracker in tuple(self._working):
            try:
                tracker.log(values["step"], numbers)
            except Exception as error:  # of whatever the tracker's package may raise
                self._working.remove(tracker)
                _warn(f"{tracker.name}: {error}; it gets no more numbers of this run")

    def _write(self, line: bytes) -> None:
        """Append to the file at once; what a full disk does not take is kept for the next time."""
        self._unwritten += line
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._disk_failed:
                _warn(f"{METRICS_FILE}: {error.strerror}; its lines wait until it can be written again")
            self._disk_failed = True

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.active:
            self._file.close()
            if self._view:
                self._view.close()
        for tracker in self._working:
            try:
                tracker.close(failed=kind is not None)
            except Exception as error:  # the run is over, and its numbers are in metrics.jsonl
                _warn(f"{tracker.name}: {error}; its last numbers are missing")


def live_view(total_steps: int, parts: Sequence[int]) -> LiveView | None:
    """The live view, where standard output is a terminal that can show it."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    from training.metrics.live_view import LiveView

    console = Console()
    return None if console.is_dumb_terminal else LiveView(console, total_steps, parts)


def cut(path: Path, first_step: int, evaluates_first: bool = False) -> None:
    """Leave only the lines of steps before `first_step` in a metrics.jsonl; it is the old file or the new one.

    A run that starts at step 1 leaves nothing, not even an evaluation before the first step; one that
    `evaluates_first` none of the evaluation that it makes again.
    """
    if not path.exists():
        return
    with replacing(path) as file:
        if first_step > 1:
            for line, values in _lines(path):
                if values["step"] < first_step - (evaluates_first and "eval_loss" in values):
                    file.write(line)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, also of a run that is still writing it."""
    return [values for _, values in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines that are whole, as they stand and read."""
    with open(path, "rb", opener=regular) as file:
        for line in file:
            try:
                values = json.loads(line)
            except ValueError:  # torn by a kill, or zeros after a power cut
                continue
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                yield line.rstrip(b"\n") + b"\n", values


def flatten(values: Mapping[str, Any]) -> dict[str, float]:
    """Every number under a name of its own: `times/data`, `peak_memory/0`; without those that are not known."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = dict(enumerate(value))  # noqa: PLW2901
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{key}": each for key, each in value.items()}
        elif value is not None:
            numbers[name] = value
    return numbers


def _warn(text: str) -> None:
    print(f"warning: {safe_line(text)}", file=sys.stderr, flush=True)

"""What a run tells while it runs: a progress bar for people, one JSON line a step for programs."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Attributes:
        step: from 1.
        epoch: from 1.
        loss: mean over the supervised tokens of the global batch.
        lr: of the step.
        grad_norm: of the whole gradient, before clipping.
        samples, tokens, supervised: of the global batch, padding not counted.
        tokens_per_s: over all processes.
        seconds: the step's wall time.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    samples: int
    tokens: int
    supervised: int
    tokens_per_s: float
    seconds: float


class Reporter:
    """Writes metrics.jsonl and shows progress; on ranks other than 0 it does nothing.

    Args:
        folder: the run's folder.
        total_steps: of the run.
        active: whether this is the rank that reports.
        steps_per_print: how often a line is printed where standard error is no terminal.
    """

    def __init__(self, folder: Path, total_steps: int, active: bool, steps_per_print: int) -> None:
        self._active = active
        self._steps_per_print = steps_per_print
        self._total = total_steps
        self._begin = time.monotonic()
        if active:
            self._file = open(folder / METRICS_FILE, "w", encoding="utf-8")
            self._bar = tqdm(
                total=total_steps,
                disable=not sys.stderr.isatty(),
                dynamic_ncols=True,
                bar_format="{desc}|{bar}| {n_fmt}/{total_fmt}, {remaining} left",
            )

    def report(self, metrics: StepMetrics) -> None:
        """Record one step."""
        if not self._active:
            return
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()
        numbers = f"loss {metrics.loss:.4f}  lr {metrics.lr:.2e}  {metrics.tokens_per_s:,.0f} tokens/s"
        self._bar.set_description(f"epoch {metrics.epoch}  {numbers}", refresh=False)
        self._bar.update()
        last = metrics.step == self._total
        if self._bar.disable and (metrics.step % self._steps_per_print == 0 or last):
            left = (time.monotonic() - self._begin) / metrics.step * (self._total - metrics.step)
            progress = f"step {metrics.step}/{self._total}  epoch {metrics.epoch}"
            print(f"{progress}  {numbers}  {tqdm.format_interval(left)} left", flush=True)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self._file.close()
            self._bar.close()

"""Show a run live on a terminal: progress, loss curve, speed, and the memory of each stage.

The view stands below the run's printed lines and is redrawn after a step, at most four times a second. In a log, a pipe
or a terminal that cannot move its cursor the run prints lines instead. Cost: some 2 ms per drawing, on rank 0.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common import terminal
from common.quantities import GIGA
from training.metrics.step_metrics import StepMetrics, shown_measures

BETWEEN = 0.25  # seconds between two drawings, at least
CURVE, BAR = 48, 24  # columns
LEVELS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=*#"


class LiveView:
    """A view at the bottom of a console; other output goes above it.

    Args:
        parts: the layers of each stage.
        printed: measures to show, by their names on the screen.
    """

    def __init__(
        self, console: Console, total_steps: int, parts: Sequence[int], printed: Mapping[str, str] | None = None
    ) -> None:
        self._console, self._total, self._parts, self._printed = console, total_steps, parts, printed or {}
        self._losses: list[float] = []
        self._drawn = 0.0
        self._live = self._open(None)
        terminal.live_views.append(self)

    def show(self, metrics: StepMetrics, left: str) -> None:
        """Show a step, and `left`, the time until the end of the run."""
        self._losses.append(metrics.loss)
        now = time.monotonic()
        if now - self._drawn >= BETWEEN or metrics.step == self._total:
            self._drawn = now
            self._live.update(self._drawing(metrics, left), refresh=True)

    def close(self) -> None:
        """Stop, and leave the last drawing on the terminal."""
        terminal.live_views.remove(self)
        self._live.stop()

    def pause(self) -> None:
        """Clear the view to make room for something else, such as a progress bar."""
        self._live.transient = True
        self._live.stop()

    def resume(self) -> None:
        """Draw again."""
        self._live = self._open(self._live.renderable if self._drawn else None)

    def _open(self, drawing: RenderableType | None) -> Live:
        """Begin below what is printed so far; a `Live` that is started again would erase the last lines of that."""
        live = Live(drawing, console=self._console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
        live.start(refresh=drawing is not None)
        self._console.show_cursor()  # a killed run could not restore it
        return live

    def _drawing(self, metrics: StepMetrics, left: str) -> Group:
        where = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total, completed=metrics.step, width=BAR)
        where.add_row(f"step {metrics.step}/{self._total}", f"epoch {metrics.epoch}", bar, f"{left} left")
        levels = ASCII_LEVELS if self._console.options.ascii_only else LEVELS
        loss = f"loss {metrics.loss:.4f}  {curve(self._losses, levels)}{shown_measures(metrics, self._printed)}"
        speed = f"lr {metrics.lr:.2e}  grad norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s:,.0f} tokens/s"
        if metrics.mfu is not None:
            speed += f"  MFU {metrics.mfu:.0%}"
        lines: list[RenderableType] = [where, Text(loss), Text(speed)]
        if metrics.peak_memory:
            held, count = self._parts, len(metrics.peak_memory)
            if len(held) == 2 * count:  # dualpipev: a stage has a chunk from either end
                held = [first + last for first, last in zip(held[:count], reversed(held), strict=False)]
            stages = enumerate(zip(held, metrics.peak_memory, strict=False))
            memory = [f"stage {stage}: {layers} layers, {most / GIGA:.1f} GB" for stage, (layers, most) in stages]
            lines.append(Text("  ".join(memory), no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


def curve(values: Sequence[float], levels: str = LEVELS, width: int = CURVE) -> str:
    """Draw values as a line of characters, each as high as the mean of its share; skip values that are not finite."""
    count = max(1, min(width, len(values)))
    borders = [len(values) * number // count for number in range(count + 1)]
    means = []
    for begin, end in pairwise(borders):
        finite = list(filter(math.isfinite, values[begin:end]))
        if finite:
            means.append(sum(finite) / len(finite))
    if not means:
        return ""
    low, span = min(means), max(means) - min(means) or 1.0
    return "".join(levels[round((mean - low) / span * (len(levels) - 1))] for mean in means)

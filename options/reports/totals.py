"""Say at the end of a run what it came to, and what to do next.

The figures are those of metrics.jsonl, so they count all starts of the run.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from training.callbacks import Callback, JobView
from training.checkpoint.folder import Best
from training.metrics.reporter import METRICS_FILE, read_metrics


class Totals(Callback):
    """Print a table of totals and the next commands, on rank 0."""

    def on_finish(self, job: JobView, checkpoint: Path) -> None:
        if job.log.quiet or not (job.save_path / METRICS_FILE).is_file():
            return
        lines = read_metrics(job.save_path / METRICS_FILE)
        best = Best.read(job.save_path, sys.maxsize, "")
        totals = totals_of(lines, best)
        if totals:
            table = Table(title="totals", show_header=False, title_justify="left")
            for name, value in totals:
                table.add_row(name, value)
            job.log.print(table)
        kinds = job.model_folder is not None, job.config.objective.says_words, bool(job.config.lora)
        newest_is_best = best is None or best.checkpoint == checkpoint.name
        for command in next_commands(str(job.save_path), *kinds, newest_is_best):
            job.log.print(f"next: {command}", soft_wrap=True)


def totals_of(lines: Sequence[dict[str, Any]], best: Best | None) -> list[tuple[str, str]]:
    """Return names and values of a run's totals, of the lines of its metrics.jsonl."""
    steps = [line for line in lines if "tokens" in line]
    if not steps:
        return []
    seconds = sum(line["seconds"] for line in steps)
    tokens = sum(line["tokens"] for line in steps)
    losses = [line["loss"] for line in steps if line["loss"] is not None and math.isfinite(line["loss"])]

    totals = [
        ("steps", f"{len(steps):,}, {sum(line['samples'] for line in steps):,} samples"),
        ("time of the steps", tqdm.format_interval(seconds)),
        ("speed", f"{tokens / seconds:,.0f} tokens/s"),
    ]
    if losses:
        totals.append(("loss", f"{losses[0]:.4f} first, {losses[-1]:.4f} last"))
    if best:
        totals.append(("best evaluation", f"{best.checkpoint}, {best.measure} {best.value:.4f}"))
    return totals


def next_commands(
    run: str, is_language_model: bool, says_words: bool, adapter: bool, newest_is_best: bool
) -> list[str]:
    """Return what to type next: talk to the model, and export it for other programs.

    Args:
        says_words: whether there is anything to talk to: a reward model and a classifier give numbers.
        newest_is_best: whether no earlier checkpoint was better by evaluation.
    """
    if not is_language_model:
        return [f"load_trained({run!r}) in Python gives the layers (docs/api.md)"]
    folder, better = shlex.quote(run), "" if newest_is_best else " --best"
    whole = " --merge" if adapter else ""
    export = f"--input-path {folder} --save-path {shlex.quote(run + '-hf')}{better}{whole}"
    talk = [f"python demo.py --model {folder}"] if says_words else []
    return [*talk, f"python convert_model.py pp_to_hg {export}"]

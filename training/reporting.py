"""Write a run's run.json, config.yml and metrics.jsonl; show progress and feed trackers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from common.whole_files import replace_text
from data.inspection import summary
from models.checkpoint.publish import writing
from training.callbacks import Callback, JobView
from training.distributed.processes import agreed
from training.metrics.reporter import Reporter
from training.metrics.run_info import CONFIG_FILE, write_run_info
from training.metrics.tracking import open_trackers

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.language_model import LanguageModel
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics


class DataSummary(Callback):
    """Log kinds and lengths of the records, and draw them in the run's folder."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def on_build(self, job: JobView) -> None:
        model, records = self._model, self._model.known_records
        if not job.log.quiet and records is not None:
            what = "an epoch" if model.known_loader else "this window"
            how = model.loader, job.config.max_seq_len, job.save_path, job.log, what
            summary.report(records, model.held_out, *how)


class Reporting(Callback):
    """Report each step and evaluation; only rank 0 writes.

    Raises:
        RunRefused: on every rank, if the run's folder or a tracker cannot be written.
    """

    def __init__(self) -> None:
        self._reporter: Reporter | None = None

    @contextmanager
    def around(self, job: JobView) -> Iterator[None]:
        try:
            yield
        finally:
            self._close()

    def on_start(self, run: Run) -> None:
        config, progress, parts = run.config, run.progress, run.topology.parts
        folder, first = Path(config.save_path), progress.done + 1
        with agreed(), writing(folder):
            if progress.log.quiet:
                return
            trackers = open_trackers(config, folder, first)
            write_run_info(folder, config, parts, first)
            replace_text(folder / CONFIG_FILE, yaml.safe_dump(config.dump(), sort_keys=False))
            last, each = progress.total_steps, config.steps_per_print
            shown = config.objective.right, config.objective.unprinted
            self._reporter = Reporter(folder, last, each, first, trackers, progress.evaluate_first, parts, *shown)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        if self._reporter is not None:
            self._reporter.report(metrics)

    def on_evaluation(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        if self._reporter is not None:
            self._reporter.report_evaluation(step, metrics)

    def on_end(self, run: Run, step: int) -> None:
        """Close first: the live view must not stand below what later callbacks print."""
        self._close()

    def _close(self) -> None:
        if self._reporter is not None:
            reporter, self._reporter = self._reporter, None
            reporter.__exit__(*sys.exc_info())

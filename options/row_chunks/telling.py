"""Say in the log into how many chunks a run cuts its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from options.row_chunks.cuts import cuts_of
from options.row_chunks.keys import KEY
from training.callbacks import Callback

if TYPE_CHECKING:
    from training.loop import Run
    from training.objective import ModelAndRecords


class TellChunks(Callback):
    """Count the chunks of the first step, as a `row_chunk` that cuts nothing would be ignored without a word."""

    def __init__(self, model: ModelAndRecords) -> None:
        self._model = model

    def on_start(self, run: Run) -> None:
        cut, step = cuts_of(run.config, self._model.spec), run.progress.done + 1
        if cut is None or step > run.progress.total_steps:
            return
        batch, counts = run.loader.batch(step - 1), []
        for replica in range(run.loader.replicas):
            counts += [len(cut(*layout)) for layout in run.loader.layouts(batch, replica)]
        least, most = min(counts), max(counts)
        chunks = f"in {most} chunks each" if least == most else f"in {least} to {most} chunks"
        found = chunks if most > 1 else f"whole, as none is longer than {KEY}: {run.config.dump()[KEY]}"
        run.progress.log.print(f"rows: {len(counts)} micro-batches of step {step} pass {found}")

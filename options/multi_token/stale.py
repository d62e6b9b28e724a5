"""Say that a model's layers ahead stay as they are, where a run trains the model without them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from models.ahead.model import stored_ahead
from training.callbacks import Callback, Choice, JobView

if TYPE_CHECKING:
    from training.objective import ModelAndRecords


class StaleDrafts(Callback):
    """Adds a line to the log of a run."""

    def __init__(self, task: ModelAndRecords) -> None:
        self._task = task  # whose model is not read yet

    def on_build(self, job: JobView) -> Iterable[Choice]:
        spec = self._task.spec
        found = stored_ahead(job.model_folder, spec.language or spec.plain) if job.model_folder else None
        if found:
            what = f"{found.depth}, exported as they are, so servers would draft with stale ones"
            yield Choice(report=[f"layers ahead: {what}; mtp trains them (docs/multi-token-prediction.md)"])

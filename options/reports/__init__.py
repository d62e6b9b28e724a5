"""Say what a run came to, draw its curves, and write the model card of what is exported (docs/resuming.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.keys import TrainConfig
from training.option import Option

if TYPE_CHECKING:
    from training.callbacks import Callback
    from training.job import Task


def _callbacks(_: TrainConfig, __: Task) -> Sequence[Callback]:
    from options.reports.totals import Totals

    return [Totals()]


def _add_to_export(checkpoint: Path, folder: Path) -> None:
    from options.reports.model_card import write_card  # loads what draws the loss curve

    write_card(checkpoint, folder)


OPTION = Option(TrainConfig, callbacks=_callbacks, add_to_export=_add_to_export)

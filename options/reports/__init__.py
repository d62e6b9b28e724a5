"""Draw a run's curves, and write the model card of what is exported (docs/resuming.md)."""

from __future__ import annotations

from pathlib import Path

from training.config.keys import TrainConfig
from training.option import Option


def _add_to_export(checkpoint: Path, folder: Path) -> None:
    from options.reports.model_card import write_card  # loads what draws the loss curve

    write_card(checkpoint, folder)


OPTION = Option(TrainConfig, add_to_export=_add_to_export)

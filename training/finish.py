"""The end of a run: its last checkpoint is there, and its export where the config asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from training.checkpoint.exporting import EXPORTED, export_run
from training.checkpoint.folder import RECORD
from training.config.keys import TrainConfig
from training.distributed.processes import agreed
from training.errors import ConfigError


def finish(config: TrainConfig, layers: Sequence[int], saved: Path, model_folder: Path, log: Console) -> None:
    """See that the last checkpoint is there, and export it where the config asks for that.

    Args:
        layers: those that this rank's stage holds.
        saved: the checkpoint.
        model_folder: the folder that the run started from.

    Raises:
        RunRefused: on every rank, where it could not be saved or exported.
    """
    with agreed():
        if not (saved / RECORD).is_file():
            raise ConfigError(
                f"save_path: the last checkpoint, {saved}, could not be saved; the same command tries again"
            )
    log.print(f"saved: {saved}")
    if config.export_hf:
        from training.model_card import write_card  # what draws takes two seconds

        target = Path(config.save_path) / EXPORTED
        export_run(saved, target, layers, model_folder, write_card)
        log.print(f"exported: {target}")

"""Choose the checkpoint of a run that is exported, and say which it is and why."""

from __future__ import annotations

import sys
from pathlib import Path

from models.checkpoint.layout import ADAPTER, resolve
from models.errors import CheckpointError
from training.checkpoint.folder import Best, CheckpointRecord


def choose_checkpoint(given: Path, wants_best: bool) -> tuple[Path, list[str]]:
    """Find the folder that is exported: the one given, or of a run's folder the newest checkpoint, or the best one.

    Returns:
        the folder, and lines that say which it is and, where another one was better, which.

    Raises:
        CheckpointError: there is none; or the best one is asked for, and there is no run that was evaluated.
    """
    folder = resolve(given, adapter=True)
    adapter, has_record = (folder / ADAPTER).is_file(), CheckpointRecord.read(folder) is not None
    if adapter and not has_record:
        raise CheckpointError(
            f"{given}: an adapter in peft's layout, which needs no conversion; to merge it, expected merge_and_unload "
            "of peft, or a run with lora.start_from"
        )
    if not has_record:
        if wants_best:
            raise CheckpointError(f"--best: {given} is no folder of a run; expected the save_path of one")
        return folder, []

    run = given if given.resolve() != folder.resolve() else folder.parent
    best = Best.read(run, sys.maxsize, "")
    by = f"{best.measure or 'evaluation'} {best.value:.4f}" if best else ""
    if wants_best:
        if best is None:
            raise CheckpointError(f"--best: no checkpoint of {run} was evaluated; expected eval_data_path or no --best")
        return run / best.checkpoint, [f"checkpoint: {best.checkpoint}, the best by {by}"]
    lines = [f"checkpoint: {folder.name}, {'as given' if run != given else 'the newest'}"]
    if best and best.checkpoint != folder.name:
        lines.append(f"best: {best.checkpoint} by {by}; --best takes it")
    return folder, lines

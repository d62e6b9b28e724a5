"""Clean up a run's folder: remove what killed writers left and old checkpoints, and point `latest` at the newest.

A failure is logged for each disk and does not end the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from common.whole_files import read_regular, replace_text
from models.checkpoint.layout import LATEST
from models.checkpoint.publish import sweep
from models.errors import CheckpointError
from training.checkpoint.folder import Best, finished, prune
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather

STAYS = "an earlier checkpoint stays"


def make_room(save_path: Path, keep_last: int, best: Best | None, disk: Disk, log: Console) -> None:
    """Clean up after a run that was killed during a save or right after one; needs the lease."""
    on_each_disk(STAYS, lambda: sweep_partial(save_path), disk, log)
    tidy_up(save_path, keep_last, best, disk, log)


def sweep_partial(save_path: Path) -> None:
    """Remove checkpoints that killed writers left unfinished or half removed."""
    sweep(save_path.glob(".step-*.partial-*"))


def tidy_up(save_path: Path, keep_last: int, best: Best | None, disk: Disk, log: Console) -> None:
    """Remove all checkpoints except the best and the newest ones that are finished on all disks."""
    held = on_each_disk(STAYS, lambda: [path.name for path in finished(save_path)], disk, log)
    kept = [name for name in chain(*held[:1]) if all(name in names for names in held)][:keep_last]
    if best:
        kept.append(best.checkpoint)
    on_each_disk(STAYS, partial(prune, save_path, keep_last, set(kept)), disk, log)


def name_latest(folder: Path) -> None:
    """Point `latest` at a checkpoint; after a kill during a save it may still name the one before."""
    path = folder.with_name(LATEST)
    with suppress(OSError):  # also a FIFO, which the new file replaces
        if read_regular(path) == folder.name.encode():
            return
    replace_text(path, folder.name)


def best_so_far(save_path: Path, step: int, records: str) -> Best | None:
    """Find the best checkpoint up to a step, on rank 0; see `Best.read`.

    Raises:
        RunRefused: on every rank, if some rank cannot read best.json.
    """
    best = None
    with agreed():
        best = Best.read(save_path, step, records)
    return gather(best)[0]


def on_each_disk(what: str, work: Callable[[], Any], disk: Disk, log: Console) -> list[Any]:
    """Do some work on the ranks that own the folder, return their results, and log failures."""
    result, failure = None, None
    if disk.owns_folder:
        try:
            result = work()
        except (OSError, CheckpointError) as error:
            failure = disk.name_host(f"{what}: {' '.join(str(error).split())}")
    results = gather((disk.owns_folder and failure is None, result, failure))
    for _, _, failure in results:
        if failure:
            log.print(f"warning: {failure}")
    return [result for done, result, _ in results if done]

"""Order in a run's folder: what killed writers left and checkpoints that are not to stay go, `latest` names the newest.

No failure ends a run by that: it is told, for each disk.
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
    """What a run that was killed in a save, or right after one, had no time for; only who holds the lease may."""
    on_each_disk(STAYS, lambda: sweep_partial(save_path), disk, log)
    tidy_up(save_path, keep_last, best, disk, log)


def sweep_partial(save_path: Path) -> None:
    """Remove the checkpoints that killed writers left unfinished or half removed."""
    sweep(save_path.glob(".step-*.partial-*"))


def tidy_up(save_path: Path, keep_last: int, best: Best | None, disk: Disk, log: Console) -> None:
    """Remove checkpoints but the newest that are finished on all disks, and the best."""
    held = on_each_disk(STAYS, lambda: [path.name for path in finished(save_path)], disk, log)
    kept = [name for name in chain(*held[:1]) if all(name in names for names in held)][:keep_last]
    if best:
        kept.append(best.checkpoint)
    on_each_disk(STAYS, partial(prune, save_path, keep_last, set(kept)), disk, log)


def name_latest(folder: Path) -> None:
    """Let `latest` name a checkpoint; a kill between two moments of a save leaves it at the one before."""
    path = folder.with_name(LATEST)
    with suppress(OSError):  # also a FIFO, which the new file replaces
        if read_regular(path) == folder.name.encode():
            return
    replace_text(path, folder.name)


def best_so_far(save_path: Path, step: int, records: str) -> Best | None:
    """The best checkpoint up to a step, as the first rank finds it; see `Best.read`.

    Raises:
        RunRefused: on every rank, where some cannot read which one it is.
    """
    best = None
    with agreed():
        best = Best.read(save_path, step, records)
    return gather(best)[0]


def on_each_disk(what: str, work: Callable[[], Any], disk: Disk, log: Console) -> list[Any]:
    """What those who keep the folder give when they do something; a failure is told, and no more."""
    given, told = None, None
    if disk.keeps:
        try:
            given = work()
        except (OSError, CheckpointError) as error:
            told = disk.told(f"{what}: {' '.join(str(error).split())}")
    results = gather((disk.keeps and told is None, given, told))
    for _, _, failure in results:
        if failure:
            log.print(f"warning: {failure}")
    return [each for done, each, _ in results if done]

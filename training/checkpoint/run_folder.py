"""Find the checkpoint to resume in a run's folder, and clean the folder up.

All ranks call these functions together, and get the same result. The checkpoint to resume is the newest that is
complete, on every disk if each host has its own. Cleaning removes what killed writers left and old checkpoints, and
points `latest` at the newest; a failure of it is logged for each disk and does not end the run.
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
from models.checkpoint.layout import LATEST, RECORD, resolve
from models.checkpoint.publish import NEW, sweep, writing
from models.errors import CheckpointError
from training.checkpoint.folder import Best, CheckpointRecord, fault, finished, prune, set_aside, step_folders
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.errors import ConfigError, RunRefused

STAYS = "an earlier checkpoint stays"


def find_checkpoint(config: TrainConfig, save_path: Path, disk: Disk, log: Console) -> Path | None:
    """Find and verify the checkpoint to resume from; None to start from the beginning.

    Raises:
        ConfigError: the folder in `resume` is no complete checkpoint, or `save_path` has other checkpoints.
        RunRefused: hosts with their own disks have different checkpoints.
    """
    if config.resume == "auto":
        return _newest(save_path, disk, log)
    folder = None
    if config.resume != "none":
        with agreed():
            folder = resolve(config.resume, adapter=True, layers=True)
        if reason := _fault_together(folder, disk):
            raise ConfigError(f"resume: {folder}: {reason}; expected a whole checkpoint of a run")
    with agreed():
        present = step_folders(save_path)
        if present and (folder is None or present[0].resolve() != folder.resolve()):
            raise ConfigError(
                f"save_path: {save_path} holds {present[0].name} of another run or a later step; expected another "
                "folder, or resume: auto"
            )
    return folder


def _newest(save_path: Path, disk: Disk, log: Console) -> Path | None:
    """Find the newest checkpoint that is complete on every disk, and point `latest` at it; set damaged ones aside.

    One rank lists each disk, as hosts may see a shared one differently. If one disk has no checkpoint while another has
    one, it is the wrong disk: refuse, so that no run of days is overwritten by a new one.
    """
    folders: list[Path] = []
    begun = False
    with agreed():
        if disk.owns_folder:
            folders = step_folders(save_path)
            begun = any(save_path.glob(f".step-*.partial-*/{NEW}/{RECORD}"))  # it died before it could rename

    disks = [each for each, owns in gather(((disk.host, folders, begun), disk.owns_folder)) if owns]
    steps = {int(folder.name[5:]): folder for folder in chain.from_iterable(folders for _, folders, _ in disks)}
    newest_first = [steps[step] for step in sorted(steps, reverse=True)]

    for host, folders, begun in disks:
        if newest_first and not folders and not begun:
            other = next(other for other, folders, _ in disks if folders)
            raise RunRefused(
                f"save_path: {save_path} holds no checkpoint on host {host}, but {newest_first[0].name} on host "
                f"{other}; expected the hosts that wrote them, each with its disk, or another save_path"
            )

    for folder in newest_first:
        reason = _fault_together(folder, disk)
        if reason is None:
            on_each_disk(f"{LATEST} could not be written", partial(name_latest, folder), disk, log)
            return folder
        log.print(f"warning: {folder.name} is passed over: {reason}")
        with agreed(), writing(save_path):
            if disk.owns_folder and folder.exists():
                set_aside(folder)
    return None


def _fault_together(folder: Path, disk: Disk) -> str | None:
    """Check a checkpoint's files, each rank its share on its disk; return the first fault, if any.

    Raises:
        RunRefused: two disks have complete but different checkpoints of the same step.
    """
    own, checksum = None, None
    with agreed():
        own = fault(folder, disk.number, len(disk.ranks))
        record = CheckpointRecord.read(folder)
        checksum = record and record.checksum("host")
    found = gather((disk.host, own and disk.name_host(own), checksum))
    if reason := next((reason for _, reason, _ in found if reason), None):
        return reason
    first, _, expected = found[0]
    for host, _, other in found:
        if other != expected:
            raise RunRefused(
                f"{folder}: on host {host} that of another run than on host {first}; expected the same on all, or "
                "none: move one of them away"
            )
    return None


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
    """Find the best checkpoint up to a step, on rank 0; see `Best.read`."""
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

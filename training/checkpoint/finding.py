"""Find the checkpoint to resume from: the newest that is complete, on every disk if each host has its own.

All ranks call these functions together, and get the same result.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.console import Console

from models.checkpoint.layout import LATEST, RECORD, resolve
from models.checkpoint.publish import NEW, writing
from training.checkpoint.folder import CheckpointRecord, fault, set_aside, step_folders
from training.checkpoint.tidying import name_latest, on_each_disk
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.errors import ConfigError, RunRefused


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
            folder = resolve(config.resume)
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

    One rank lists each disk, as hosts may see a shared one differently. A disk without any checkpoint, while others
    have one, is the wrong disk: refuse, so that a run of days is not overwritten by a new one.
    """
    folders: list[Path] = []
    begun = False
    with agreed():
        if disk.keeps:
            folders = step_folders(save_path)
            begun = any(save_path.glob(f".step-*.partial-*/{NEW}/{RECORD}"))  # it died before it could rename
    told = [each for each in gather((disk.host, disk.keeps, folders, begun)) if each[1]]
    known = sorted({int(folder.name[5:]): folder for _, _, its, _ in told for folder in its}.items(), reverse=True)
    for host in (host for host, _, its, begun in told if known and not its and not begun):
        other = next(other for other, _, its, _ in told if its)
        raise RunRefused(
            f"save_path: {save_path} holds no checkpoint on host {host}, but {known[0][1].name} on host {other}; "
            "expected the hosts that wrote them, each with its disk, or another save_path"
        )
    for _, folder in known:
        reason = _fault_together(folder, disk)
        if reason is None:
            on_each_disk(f"{LATEST} could not be written", partial(name_latest, folder), disk, log)
            return folder
        log.print(f"warning: {folder.name} is passed over: {reason}")
        with agreed(), writing(save_path):
            if disk.keeps and folder.exists():
                set_aside(folder)
    return None


def _fault_together(folder: Path, disk: Disk) -> str | None:
    """Check a checkpoint's files, each rank its share on its disk; return the first fault, if any.

    Raises:
        RunRefused: two disks have complete but different checkpoints of the same step.
    """
    mine, which = None, None
    with agreed():
        mine = fault(folder, disk.number, len(disk.ranks))
        record = CheckpointRecord.read(folder)
        which = record and record.checksum("host")
    told = gather((disk.host, mine and disk.told(mine), which))
    for host, _, other in told:
        if other != told[0][2] and not any(reason for _, reason, _ in told):
            raise RunRefused(
                f"{folder}: on host {host} that of another run than on host {told[0][0]}; expected the same on all, or "
                "none: move one of them away"
            )
    return next((reason for _, reason, _ in told if reason), None)

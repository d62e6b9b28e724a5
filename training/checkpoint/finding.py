"""Which checkpoint a run goes on from: the newest that is whole, on every disk where each host has its own.

All ranks call what is here together, and come to the same.
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
    """The checkpoint to continue from, found whole; None to start from the beginning. All ranks call it together.

    Raises:
        ConfigError: the folder that `resume` names is no whole checkpoint, or `save_path` holds others.
        RunRefused: hosts with disks of their own hold other checkpoints than each other.
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
    """The newest checkpoint that is whole on every disk, `latest` from now on; others are named, and set aside.

    Of each disk one rank's list counts, as a shared one may show each host another. A disk that has never seen a
    checkpoint beside one that has is not the run's: no weights of a run of days may be lost to a new one by that.
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
    """Each rank checks its share of a checkpoint's files on its disk.

    Raises:
        RunRefused: two disks hold a whole one of the same step, but not the same.
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

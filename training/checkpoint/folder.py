"""A run's checkpoint folders on disk: what makes one whole, which is the newest, which may go.

`save_path/step-000120/` is whole when it holds `checkpoint.json`, which is written last and lists every file with its
size and CRC-32. A folder that a crash left half-written has none; a damaged one does not fit its list. The checksum
tells damage from accident, not from intent: 4 GB/s a core, so checking runs at the speed of the disk.
"""

from __future__ import annotations

import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from data.streaming.windows import Made
from models.checkpoint.layout import LATEST
from training.atomic_files import replace_text
from training.topology import Topology

RECORD = "checkpoint.json"
BEST = "best.json"
PIECE = 2**20  # what is summed up is still in the processor's cache


class FileRecord(BaseModel):
    """What a whole file has."""

    size: int
    crc32: int


class DataOrder(BaseModel):
    """What decides which samples a step sees; with the step itself it is the position in the data.

    Attributes:
        packed_epoch: the length of the rows where whole epochs are packed; 0 elsewhere.
        windows: of a stream, those that were made so far: by them a run finds its place without reading all before it.
    """

    model_config = ConfigDict(extra="forbid")

    samples: int
    fingerprint: str
    seed: int
    train_batch_size: int
    dataloader_drop_last: bool
    packed_epoch: int = 0
    stream_gb: float | None = None
    windows: list[Made] = []


class CheckpointRecord(BaseModel):
    """`checkpoint.json`.

    Attributes:
        settings: the values of the config that a later start is compared with (`training.config.changes`).
        evaluated: whether the evaluation after this step, if one is due, is done.
    """

    step: int
    topology: Topology
    data: DataOrder
    settings: dict[str, Any] = {}
    files: dict[str, FileRecord] = {}
    crc32: int = 0
    evaluated: bool = True

    @classmethod
    def read(cls, folder: Path) -> CheckpointRecord | None:
        """The record of a folder; None where there is none, or none that can be read."""
        try:
            record = cls.model_validate_json((folder / RECORD).read_bytes())
        except (OSError, ValidationError):
            return None
        return record if record.crc32 == record.checksum() else None

    def write(self, folder: Path) -> None:
        """Write it last: from now on the folder counts as whole."""
        whole = self.model_copy(update={"crc32": self.checksum()})
        replace_text(folder / RECORD, whole.model_dump_json(indent=1, exclude_unset=True) + "\n")

    def checksum(self) -> int:
        """The CRC-32 of all that it says but this; what a later version would say besides does not count."""
        return zlib.crc32(self.model_dump_json(exclude={"crc32"}, exclude_unset=True).encode())


class Best(BaseModel):
    """`best.json`: the checkpoint with the lowest evaluation loss so far.

    Attributes:
        records: the fingerprint of those it was measured on; empty where an earlier version wrote it.
    """

    checkpoint: str
    step: int
    eval_loss: float
    records: str = ""

    @classmethod
    def read(cls, save_path: Path, step: int, records: str) -> Best | None:
        """What an earlier start of the run found best up to `step` on these records, if it is still there."""
        try:
            best = cls.model_validate_json((save_path / BEST).read_bytes())
        except (OSError, ValidationError):
            return None
        others = best.records and records and best.records != records
        if others or best.step > step:
            return None
        return best if (save_path / best.checkpoint / RECORD).is_file() else None

    def write(self, save_path: Path) -> None:
        replace_text(save_path / BEST, self.model_dump_json() + "\n")


def step_folder(save_path: Path, step: int) -> Path:
    return save_path / f"step-{step:06d}"


def step_folders(save_path: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, newest first."""
    found = [(int(match[1]), path) for path in save_path.glob("step-*") if (match := _step(path)) and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def fault(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """Why a folder is no whole checkpoint, or None. Of the files it looks at each `shares`-th, beginning at `share`."""
    record = CheckpointRecord.read(folder)
    if record is None:
        missing = not (folder / RECORD).is_file()
        return f"no {RECORD}: it was never finished" if missing else f"{RECORD} is damaged"
    for name, expected in sorted(record.files.items())[share::shares]:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected.size:
            return f"{name} has {path.stat().st_size} bytes instead of {expected.size}"
        if file_record(path) != expected:
            return f"{name} is damaged: its checksum differs"
    return None


def file_record(path: Path) -> FileRecord:
    """Size and checksum of a file."""
    checksum = size = 0
    memory = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(memory):
            checksum = zlib.crc32(memory[:count], checksum)
            size += count
    return FileRecord(size=size, crc32=checksum)


def point_latest(save_path: Path, folder: Path) -> None:
    """Let `latest` name a checkpoint that is whole."""
    replace_text(save_path / LATEST, folder.name)


def set_aside(folder: Path) -> None:
    """Give a damaged checkpoint a name under which it counts no more; nothing is lost."""
    aside = folder.with_name(f"{folder.name}.damaged")
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)


def remove(folder: Path) -> None:
    """Remove a checkpoint; its record goes first, so that a crash meanwhile leaves nothing that looks whole."""
    (folder / RECORD).unlink(missing_ok=True)
    shutil.rmtree(folder)


def prune(save_path: Path, keep_last: int, keep: set[str]) -> None:
    """Remove all checkpoints but the newest whole ones and those named in `keep`, unfinished ones too."""
    whole = [folder for folder in step_folders(save_path) if (folder / RECORD).is_file()]
    kept = {folder.name for folder in whole[:keep_last]} | keep
    for folder in step_folders(save_path):
        if folder.name not in kept:
            remove(folder)


def _step(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"step-(\d+)", path.name)

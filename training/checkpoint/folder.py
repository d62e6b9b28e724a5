"""A run's checkpoint folders on disk: what makes one whole, which is the newest, which may go.

`save_path/step-000120/` is whole when it holds `checkpoint.json`, which is written last and lists every file with its
size and CRC-32. It is written under a hidden name (`models.checkpoint.publish`), so a crash leaves nothing half-written
under this one. The checksum is taken of whole files, although most are zip archives with a checksum for each entry:
nothing guards their own lists.

A file that cannot be read is not damaged, as its disk may be back tomorrow: it stops the run, and nothing is changed.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from common.whole_files import read_regular, regular, replace_text
from models.checkpoint.layout import RECORD, FileName
from models.checkpoint.publish import workplace
from models.errors import GONE, CheckpointError, reading
from training.topology import Topology

BEST = "best.json"
PIECE = 2**20  # what is summed up is still in the processor's cache


class FileRecord(BaseModel):
    """What a whole file has: bytes, and their checksum."""

    size: int
    crc32: int


class DataOrder(BaseModel):
    """What decides which samples a step sees; with the step itself it is the position in the data.

    Attributes:
        packed_epoch: the length of the rows where whole epochs are packed; 0 elsewhere.
        windows: of a stream, those tokenized so far (`data.streaming.windows.Made`): by them a run finds its place
            without reading all records before it.
    """

    model_config = ConfigDict(extra="forbid")

    samples: int
    fingerprint: str
    seed: int
    train_batch_size: int
    dataloader_drop_last: bool
    packed_epoch: int = 0
    stream_gb: float | None = None
    windows: list[Any] = []


class CheckpointRecord(BaseModel):
    """`checkpoint.json`.

    Attributes:
        settings: the values of the config that a later start is compared with (`training.config.changes`).
        files: that all ranks wrote, by name; empty where each host has its own disk.
        hosts: the files that were written on each host then, the same in every host's copy of the record.
        host: which of them wrote this folder.
        evaluated: whether the evaluation after this step, if one is due, is done.
    """

    step: int
    topology: Topology
    data: DataOrder
    settings: dict[str, Any] = {}
    files: dict[FileName, FileRecord] = {}
    hosts: dict[str, dict[FileName, FileRecord]] = {}
    host: str = ""
    crc32: int = 0
    evaluated: bool = True

    @classmethod
    def read(cls, folder: Path) -> CheckpointRecord | None:
        """The record of a folder; None where there is none, or a damaged one.

        Raises:
            CheckpointError: it is there and cannot be read.
        """
        try:
            with reading(folder / RECORD):
                return cls.parse(read_regular(folder / RECORD))
        except GONE:
            return None

    @classmethod
    def parse(cls, content: bytes) -> CheckpointRecord | None:
        """What is in a `checkpoint.json`; None where it is damaged."""
        try:
            record = cls.model_validate_json(content)
        except ValidationError:
            return None
        return record if record.crc32 == record.checksum() else None

    @property
    def here(self) -> dict[FileName, FileRecord]:
        """The files of the folder that holds this copy of the record."""
        return self.hosts.get(self.host, {}) if self.hosts else self.files

    def write(self, folder: Path) -> None:
        """From now on the folder counts as whole."""
        whole = self.model_copy(update={"crc32": self.checksum()})
        replace_text(folder / RECORD, whole.model_dump_json(indent=1, exclude_unset=True) + "\n")

    def checksum(self, *but: str) -> int:
        """The CRC-32 of all that it says but this, and `but`; what a later version would say besides does not count."""
        return zlib.crc32(self.model_dump_json(exclude={"crc32", *but}, exclude_unset=True).encode())


class Best(BaseModel):
    """`best.json`: the checkpoint with the lowest evaluation loss so far.

    Attributes:
        eval_loss: finite; null of an earlier version, which counts for nothing.
        records: the fingerprint of those it was measured on; empty where an earlier version wrote it.
    """

    checkpoint: str
    step: int
    eval_loss: Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
    records: str = ""

    @classmethod
    def read(cls, save_path: Path, step: int, records: str) -> Best | None:
        """What an earlier start of the run found best up to `step` on these records, if it is still there.

        Raises:
            CheckpointError: the file is damaged or cannot be read; without it the best checkpoint would be removed.
        """
        path = save_path / BEST
        try:
            with reading(path):
                best = cls.model_validate_json(read_regular(path))
        except GONE:
            return None
        except ValidationError:
            raise CheckpointError(f"{path}: damaged; remove it to go on without a best checkpoint so far") from None
        others = best.records and records and best.records != records
        if others or best.step > step or not math.isfinite(best.eval_loss):
            return None
        return best if CheckpointRecord.read(save_path / best.checkpoint) else None

    def write(self, save_path: Path) -> None:
        replace_text(save_path / BEST, self.model_dump_json() + "\n")


def step_folder(save_path: Path, step: int) -> Path:
    return save_path / f"step-{step:06d}"


def step_folders(save_path: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, newest first.

    Raises:
        CheckpointError: the run's folder cannot be read.
    """
    steps = []
    with suppress(FileNotFoundError), reading(save_path), os.scandir(save_path) as entries:
        for entry in entries:
            if (match := re.fullmatch(r"step-(\d+)", entry.name)) and entry.is_dir():
                steps.append((int(match[1]), save_path / entry.name))
    return [path for _, path in sorted(steps, reverse=True)]


def fault(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """Why a folder is no whole checkpoint, or None. Of the files it looks at each `shares`-th, beginning at `share`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    record = CheckpointRecord.read(folder)
    if record is None:
        return f"{RECORD} is damaged" if _has_record(folder) else f"no {RECORD}: it was never finished"
    for name, expected in sorted(record.here.items())[share::shares]:
        path = folder / name
        try:
            with reading(path):
                size = path.stat().st_size
                if size != expected.size:
                    return f"{name} has {size} bytes instead of {expected.size}"
                if file_record(path) != expected:
                    return f"{name} is damaged: its checksum differs"
        except GONE:
            return f"{name} is missing"
    return None


def file_record(path: Path) -> FileRecord:
    checksum = size = 0
    memory = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0, opener=regular) as file:
        while count := file.readinto(memory):
            checksum = zlib.crc32(memory[:count], checksum)
            size += count
    return FileRecord(size=size, crc32=checksum)


def set_aside(folder: Path) -> None:
    """Give a damaged checkpoint a name under which it counts no more; nothing is lost."""
    names = (f"{folder.name}.damaged{f'-{number}' if number > 1 else ''}" for number in count(1))
    folder.rename(next(path for path in map(folder.with_name, names) if not os.path.lexists(path)))


def prune(save_path: Path, keep_last: int, keep: set[str]) -> None:
    """Remove all checkpoints but the newest whole ones, those named in `keep` and those with files of a user's in them.

    Raises:
        CheckpointError, OSError: a folder cannot be read or removed.
    """
    for folder in finished(save_path)[keep_last:]:
        record = CheckpointRecord.read(folder)
        if folder.name in keep or folder.is_symlink() or record is None:
            continue
        present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
        if present <= {*record.here, RECORD}:
            with workplace(folder) as place:  # a crash meanwhile leaves nothing that looks whole
                folder.rename(place)


def finished(save_path: Path) -> list[Path]:
    """The folders of checkpoints that have a record, newest first.

    Raises:
        CheckpointError: as `step_folders`.
    """
    return [folder for folder in step_folders(save_path) if _has_record(folder)]


def _has_record(folder: Path) -> bool:
    with suppress(FileNotFoundError), reading(folder):
        return RECORD in os.listdir(folder)
    return False

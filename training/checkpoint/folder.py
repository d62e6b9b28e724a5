"""List, verify and remove the checkpoint folders of a run.

`save_path/step-000120/` is complete when it has `checkpoint.json`, which is written last and lists every file with its
size and CRC-32. It is written under a hidden name (`models.checkpoint.publish`), so a crash leaves nothing half-written
under this one. The checksum covers whole files: most are zip archives with a checksum for each entry, but none for the
archive's directory.

A file that cannot be read is not damaged, as its disk may be back tomorrow: a CheckpointError stops the run, nothing
is changed.
"""

from __future__ import annotations

import logging
import math
import os
import re
import zlib
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from common.whole_files import read_regular, regular, replace_text
from models.checkpoint.layout import CARRIED, RECORD, FileName
from models.checkpoint.publish import hidden_folder
from models.errors import GONE, CheckpointError, reading
from training.topology import Topology

logger = logging.getLogger("pipetune")

BEST = "best.json"
WEIGHTS = rf"layer_|{re.escape(CARRIED)}"
PIECE = 2**20  # bytes; a piece is still in the processor's cache when its checksum is computed


class FileRecord(BaseModel):
    """The size and checksum of a file."""

    size: int
    crc32: int


class DataOrder(BaseModel):
    """What decides which samples a step sees; together with the step, the position in the data.

    Attributes:
        packed_epoch: length of packed sequences with `packing: dataset`, else 0.
        windows: of a stream, those tokenized so far (numbers of each), so that a resumed run does not
            read all earlier records.
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
        settings: values of the config to compare later starts with (`training.config.changes`).
        files: name -> record of each file; empty if each host has its own disk.
        hosts: host -> its files, if each has its own disk; the same in every host's copy.
        host: that wrote this folder.
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
        """Read the record of a folder; None if it is missing or damaged."""
        try:
            with reading(folder / RECORD):
                return cls.parse(read_regular(folder / RECORD))
        except GONE:
            return None

    @classmethod
    def parse(cls, content: bytes) -> CheckpointRecord | None:
        """Parse a `checkpoint.json`; None if it is damaged."""
        try:
            record = cls.model_validate_json(content)
        except ValidationError:
            return None
        return record if record.crc32 == record.checksum() else None

    @property
    def here(self) -> dict[FileName, FileRecord]:
        """List the files of the folder that holds this copy of the record."""
        return self.hosts.get(self.host, {}) if self.hosts else self.files

    def write(self, folder: Path) -> None:
        """Write the record, which makes the folder complete."""
        whole = self.model_copy(update={"crc32": self.checksum()})
        replace_text(folder / RECORD, whole.model_dump_json(indent=1, exclude_unset=True) + "\n")

    def checksum(self, *but: str) -> int:
        """Return the CRC-32 of all set fields except `crc32` and `but`; fields of later versions do not count."""
        return zlib.crc32(self.model_dump_json(exclude={"crc32", *but}, exclude_unset=True).encode())


class Best(BaseModel):
    """`best.json`: the best checkpoint by evaluation so far.

    Attributes:
        measure: the number of an evaluation that decides, such as `eval_loss`; the smaller, the better.
        value: finite; earlier versions call it eval_loss, whatever it is of, and may have null, which is ignored.
        records: fingerprint of the evaluation set; empty if written by an earlier version.
    """

    checkpoint: str
    step: int
    measure: str = ""
    value: Annotated[
        float,
        BeforeValidator(lambda value: math.nan if value is None else value),
        Field(validation_alias=AliasChoices("value", "eval_loss")),
    ]
    records: str = ""

    @classmethod
    def read(cls, save_path: Path, step: int, records: str) -> Best | None:
        """Read the best checkpoint up to `step` on these records, if it still exists."""
        path = save_path / BEST
        try:
            with reading(path):
                best = cls.model_validate_json(read_regular(path))
        except GONE:
            return None
        except ValidationError:  # without it the best checkpoint would be removed
            raise CheckpointError(f"{path}: damaged; remove it to go on without a best checkpoint so far") from None
        others = best.records and records and best.records != records
        if others or best.step > step or not math.isfinite(best.value):
            return None
        return best if CheckpointRecord.read(save_path / best.checkpoint) else None

    def write(self, save_path: Path) -> None:
        replace_text(save_path / BEST, self.model_dump_json() + "\n")


def step_folder(save_path: Path, step: int) -> Path:
    return save_path / f"step-{step:06d}"


def step_folders(save_path: Path) -> list[Path]:
    """List the folders of checkpoints, complete or not, newest first."""
    steps = []
    with suppress(FileNotFoundError), reading(save_path), os.scandir(save_path) as entries:
        for entry in entries:
            if (match := re.fullmatch(r"step-(\d+)", entry.name)) and entry.is_dir():
                steps.append((int(match[1]), save_path / entry.name))
    return [path for _, path in sorted(steps, reverse=True)]


def fault(folder: Path, share: int = 0, shares: int = 1, names: str = "") -> str | None:
    """Return why a folder is no complete checkpoint, or None; of the files like `names`, check one in `shares`."""
    record = CheckpointRecord.read(folder)
    if record is None:
        return f"{RECORD} is damaged" if _has_record(folder) else f"no {RECORD}: it was never finished"
    listed = [each for each in sorted(record.here.items()) if re.match(names, each[0])]
    for name, expected in listed[share::shares]:
        path = folder / name
        try:
            with reading(path):
                size = path.stat().st_size
                if size != expected.size:
                    way = "shorter" if size < expected.size else "longer"
                    return f"{name} is {way} than recorded: {size} bytes instead of {expected.size}"
                if file_record(path) != expected:
                    return f"{name} is damaged: its checksum differs"
        except GONE:
            return f"{name} is missing"
    return None


def check_weights(folder: Path) -> None:
    """Refuse a checkpoint whose weights are not as they were saved; warn of other changed files but the optimizer's."""
    if not _has_record(folder):
        return
    if reason := fault(folder, names=WEIGHTS):
        raise CheckpointError(f"{folder}: {reason}; expected it as it was saved, or another checkpoint")
    if reason := fault(folder, names=rf"(?!{WEIGHTS}|.*\.pt$)"):
        logger.warning("warning: %s: %s; it is taken as it is", folder, reason)


def file_record(path: Path) -> FileRecord:
    checksum = size = 0
    memory = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0, opener=regular) as file:
        while count := file.readinto(memory):
            checksum = zlib.crc32(memory[:count], checksum)
            size += count
    return FileRecord(size=size, crc32=checksum)


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint so that it is ignored; nothing is lost."""
    names = (f"{folder.name}.damaged{f'-{number}' if number > 1 else ''}" for number in count(1))
    folder.rename(next(path for path in map(folder.with_name, names) if not os.path.lexists(path)))


def prune(save_path: Path, keep_last: int, keep: set[str]) -> None:
    """Remove all checkpoints except the newest complete ones, those named in `keep`, and those with foreign files."""
    for folder in finished(save_path)[keep_last:]:
        record = CheckpointRecord.read(folder)
        if folder.name in keep or folder.is_symlink() or record is None:
            continue
        present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
        if present <= {*record.here, RECORD}:
            with hidden_folder(folder) as hidden:  # a crash meanwhile leaves nothing that looks complete
                folder.rename(hidden)


def finished(save_path: Path) -> list[Path]:
    """List the folders of checkpoints that have a record, newest first."""
    return [folder for folder in step_folders(save_path) if _has_record(folder)]


def _has_record(folder: Path) -> bool:
    with reading(folder):
        return (folder / RECORD).exists()

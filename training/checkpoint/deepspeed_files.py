"""How DeepSpeed's checkpoint files are written and read: on the disk at the end, and never unpickled blindly.

DeepSpeed gives every state dict to its checkpoint engine. This one brings each file to the disk and takes its checksum
for `checkpoint.json` while the next one is written; keeps an error until all ranks can hear of it, because a rank that
raised while the others wait in a barrier would hang the run; and reads with `weights_only=True`.

Cost: each file is read once more, from the system's memory, at the speed of a CRC-32 (1 to 4 GB/s) and not slower than
most disks take it; so where there is a core to spare it takes no time.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from models.checkpoint.parallel import sync, write_behind
from models.checkpoint.tensor_files import load_archive
from training.checkpoint.folder import FileRecord, file_record

# What DeepSpeed puts into its files besides tensors and containers.
KNOWN = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, OrderedDict, defaultdict]


class CheckpointFiles(TorchCheckpointEngine):
    """Writes and reads the files of one checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(2)
        self._settling: dict[str, Future[FileRecord]] = {}
        self._error: OSError | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""
        self._settling, self._error = {}, None

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; after an error nothing more."""
        if self._error:
            return
        try:
            with open(path, "wb") as file:
                torch.save(state_dict, file)
            self._settling[Path(path).name] = self._pool.submit(_settle, Path(path))
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            self._error = cause

    def written(self) -> dict[str, FileRecord]:
        """What this rank wrote since `create`, by file name, once it is on the disk.

        Raises:
            OSError: the first error since `create`.
        """
        records = {name: record.result() for name, record in self._settling.items()}
        if self._error:
            raise self._error
        return records

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file.

        Raises:
            CheckpointError: it is damaged or holds what could run code.
        """
        with torch.serialization.safe_globals(KNOWN):
            return load_archive(Path(path), map_location=map_location)


def read_mapped(path: Path) -> Any:
    """Read one file; its tensors stay on the disk, and of them only what is used comes into memory.

    Raises:
        CheckpointError: it is damaged or holds what could run code.
    """
    with torch.serialization.safe_globals(KNOWN):
        return load_archive(path, mmap=True)


def _settle(path: Path) -> FileRecord:
    """Bring a file to the disk and let go of it; its checksum is taken before, while the system has it in memory."""
    record = file_record(path)
    sync(path)
    write_behind(path)
    return record

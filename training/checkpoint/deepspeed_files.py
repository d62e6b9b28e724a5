"""How a checkpoint's files are written and read: on the disk at the end, and never unpickled blindly.

DeepSpeed gives every state dict to its checkpoint engine, and the run its own files. This engine takes the checksum of
what it writes and sends it on to the disk meanwhile, so that little is left to wait for at the end. It keeps an error
until all ranks can hear of it: a rank that raised while the others wait in a barrier would hang the run.

Cost: on top of `torch.save` a CRC-32 of what lies in the processor's cache, 1 to 4 GB/s a core.
"""

from __future__ import annotations

import io
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from common.whole_files import sync
from models.checkpoint.parallel import in_parallel, write_behind
from models.checkpoint.torch_files import load_archive
from training.checkpoint.folder import PIECE, FileRecord

# What DeepSpeed puts into its files besides tensors and containers.
KNOWN = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, OrderedDict, defaultdict]
BEHIND = 64 * 2**20  # bytes that wait in memory for the disk


class CheckpointFiles(TorchCheckpointEngine):
    """Writes the files of one checkpoint after the other.

    Attributes:
        offsets: of what this rank keeps of each weight, where in it that begins; DeepSpeed's file does not say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offsets: dict[str, int] = {}
        self._records: dict[Path, FileRecord] = {}
        self._error: OSError | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""
        self._records, self._error = {}, None

    def save(self, state_dict: Any, path: str) -> None:
        """Write a state dict; see `write`."""
        if "optimizer_state_dict" in state_dict:
            state_dict = state_dict | {"offsets": self.offsets}
        self.write(Path(path), partial(torch.save, state_dict))

    def write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
        """Write one file; after an error nothing more."""
        if self._error:
            return
        try:
            with SummedFile(path) as file:
                fill(file)
            write_behind(path)
            self._records[path] = FileRecord(size=file.size, crc32=file.crc32)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            self._error = cause

    def written(self) -> dict[str, FileRecord]:
        """What this rank wrote since `create`, by file name, once it is on the disk; it leaves the cache.

        Raises:
            OSError: the first error since `create`, or one of the disk.
        """
        if self._error:
            raise self._error
        in_parallel(sync, self._records)
        for path in self._records:
            write_behind(path)
        return {path.name: record for path, record in self._records.items()}


class SummedFile(io.BufferedWriter):
    """A new file that counts its bytes, takes its own checksum and goes to the disk while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._path = path
        self.size = self.crc32 = self._sent = 0

    def write(self, content: Any) -> int:
        content = memoryview(content)
        for begin in range(0, len(content), PIECE):
            piece = content[begin : begin + PIECE]
            self.size += super().write(piece)
            self.crc32 = zlib.crc32(piece, self.crc32)
            if self.size - self._sent >= BEHIND:
                self._sent = self.size
                write_behind(self._path)
        return len(content)


def read_mapped(path: Path) -> Any:
    """Read one file; its tensors stay on the disk, and of them only what is used comes into memory.

    Raises:
        CheckpointError: it is damaged or holds what could run code.
    """
    with torch.serialization.safe_globals(KNOWN):
        return load_archive(path)

"""Write a checkpoint's files durably, and read them without unpickling arbitrary code.

DeepSpeed passes every state dict to its checkpoint engine, and the run its own files. This engine computes checksums
while it writes, and starts the write-out to disk early, so that little is left at the end. It keeps an error until all
ranks can learn of it: a rank that raised while the others wait in a barrier would hang the run.

With `save_async` the same files are made in memory, and a thread writes them while training continues.

Cost: on top of `torch.save` a CRC-32 of cached data, 1 to 4 GB/s per core. In the background, host memory for all that
this rank writes, until it is written; making a file there takes 1.2 to 2 times as long as a copy of its tensors.
"""

from __future__ import annotations

import io
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from common.whole_files import sync
from models.checkpoint.tensor_files import load_archive, os_errors
from models.checkpoint.tensor_io import in_parallel, write_behind
from training.checkpoint.folder import PIECE, FileRecord

# Types in DeepSpeed's files besides tensors and containers.
KNOWN = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, OrderedDict, defaultdict]
BEHIND = 64 * 2**20  # bytes that wait in memory for the disk


class CheckpointFiles(TorchCheckpointEngine):
    """Writes the files of one checkpoint after the other.

    Args:
        background: whether a thread writes while training continues.

    Attributes:
        offsets: weight -> offset of this rank's slice in it, which DeepSpeed's file does not have.
    """

    def __init__(self, background: bool = False) -> None:
        super().__init__()
        self.offsets: dict[str, int] = {}
        self._records: dict[Path, FileRecord] = {}
        self._error: OSError | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._tasks: list[Future[None]] = []

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""
        self._records, self._error, self._tasks = {}, None, []

    def save(self, state_dict: Any, path: str) -> None:
        """Write a state dict; see `write`."""
        if "optimizer_state_dict" in state_dict:
            state_dict = state_dict | {"offsets": self.offsets}
        fill: Callable[[BinaryIO], object] = partial(torch.save, state_dict)
        if self._thread:
            fill(made := io.BytesIO())
            fill = methodcaller("write", made.getbuffer())
        self.write(Path(path), fill)

    def write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
        """Write one file; do nothing after an error."""
        self._do(partial(self._write, path, fill))

    def close(self) -> None:
        """Flush all files of the checkpoint to the disk."""
        self._do(self._sync)

    @property
    def done(self) -> bool:
        """Return whether nothing is being written."""
        return all(task.done() for task in self._tasks)

    def wait(self) -> dict[str, FileRecord]:
        """Wait until the files are on the disk; return name -> record, or raise the first OSError since `create`."""
        for task in self._tasks:
            task.result()
        if self._error:
            raise self._error
        return {path.name: record for path, record in self._records.items()}

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread:
            self._tasks.append(self._thread.submit(work))
        else:
            work()

    def _write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
        if self._error:
            return
        try:
            with os_errors(), SummedFile(path) as file:
                fill(file)
            write_behind(path)
            self._records[path] = FileRecord(size=file.size, crc32=file.crc32)
        except OSError as error:
            self._error = error

    def _sync(self) -> None:
        """Flush the files to the disk, and drop them from the page cache."""
        try:
            in_parallel(sync, self._records)
            for path in self._records:
                write_behind(path)
        except OSError as error:
            self._error = self._error or error


class SummedFile(io.BufferedWriter):
    """A new file that counts its bytes, computes its checksum, and is flushed while it is written."""

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
    """Read one file, unless it is damaged or could run code; its tensors are mapped, and only used ones take memory."""
    with torch.serialization.safe_globals(KNOWN):
        return load_archive(path)

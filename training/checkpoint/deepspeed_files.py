"""Write a checkpoint's files durably, and read them without unpickling arbitrary code.

DeepSpeed passes every state dict to its checkpoint engine, and the run its own files. This engine computes checksums
while it writes, and starts the write-out to disk early, so that little is left at the end. It keeps an error until all
ranks can learn of it: a rank that raised while the others wait in a barrier would hang the run.

With `save_async` a thread writes copies, and training continues once they are made. The files are the same, except that
GPU tensors are saved as CPU tensors, to which they are loaded in any case.

Cost: on top of `torch.save` a CRC-32 of cached data, 1 to 4 GB/s per core. In the background, host memory for all that
this rank writes, until it is written. It is not pinned: torch would round each block up to a power of two and keep it.
"""

from __future__ import annotations

import io
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.utils._pytree import tree_leaves

from common.whole_files import sync
from models.checkpoint.tensor_files import load_archive
from models.checkpoint.tensor_io import in_parallel, write_behind
from training.checkpoint.folder import PIECE, FileRecord

# Types in DeepSpeed's files besides tensors and containers.
KNOWN = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, OrderedDict, defaultdict]
BEHIND = 64 * 2**20  # bytes that wait in memory for the disk


class CheckpointFiles(TorchCheckpointEngine):
    """Writes the files of one checkpoint after the other.

    Args:
        background: whether a thread writes copies while training continues.

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
        if self._thread:
            state_dict = in_host_memory(state_dict)
        self.write(Path(path), partial(torch.save, state_dict))

    def write(self, path: Path, fill: Callable[[BinaryIO], object]) -> None:
        """Write one file; do nothing after an error."""
        self._do(partial(self._write, path, fill))

    def close(self) -> None:
        """Flush all files of the checkpoint to the disk."""
        self._do(self._sync)

    @property
    def done(self) -> bool:
        """Whether nothing is being written."""
        return all(task.done() for task in self._tasks)

    def written(self) -> dict[str, FileRecord]:
        """Wait until the files are on the disk, and return them: name -> record.

        Raises:
            OSError: the first error since `create`.
        """
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
            with SummedFile(path) as file:
                fill(file)
            write_behind(path)
            self._records[path] = FileRecord(size=file.size, crc32=file.crc32)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            self._error = cause

    def _sync(self) -> None:
        """Flush the files to the disk, and drop them from the page cache."""
        try:
            in_parallel(sync, self._records)
            for path in self._records:
                write_behind(path)
        except OSError as error:
            self._error = self._error or error


def in_host_memory(state: Any) -> Any:
    """Copy a state dict to host memory; tensors that share memory do so in the copy too."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Any] = {}  # id of the original -> copy, the memo of `deepcopy`
    for tensor in filter(torch.is_tensor, tree_leaves(state)):
        whole = tensor.untyped_storage()
        if whole._cdata not in storages:
            storages[whole._cdata] = torch.UntypedStorage(whole.nbytes()).copy_(whole)
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(storages[whole._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        vars(copy).update(deepcopy(vars(tensor), copies))  # DeepSpeed's attributes of tensors go into the file
        copies[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return deepcopy(state, copies)


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
    """Read one file with its tensors mapped: only what is used comes into memory.

    Raises:
        CheckpointError: it is damaged, or could run code.
    """
    with torch.serialization.safe_globals(KNOWN):
        return load_archive(path)

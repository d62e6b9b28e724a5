"""How DeepSpeed's checkpoint files are written and read: counted and summed up on the way, and never unpickled blindly.

DeepSpeed gives every state dict to its checkpoint engine. This one notes size and checksum of each file while it is
written, for `checkpoint.json`; keeps an error until all ranks can hear of it, because a rank that raised while the
others wait in a barrier would hang the run; and reads with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from models.errors import CheckpointError
from training.checkpoint.folder import FileRecord
from training.checkpoint.summed_file import SummedFile

# What DeepSpeed puts into its files besides tensors and containers.
KNOWN = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, OrderedDict, defaultdict]


class CheckpointFiles(TorchCheckpointEngine):
    """Writes and reads the files of one checkpoint.

    Attributes:
        written: what this rank wrote since `create`, by file name.
        error: the first error since `create`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""
        self.written, self.error = {}, None

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; after an error nothing more."""
        if self.error:
            return
        try:
            with SummedFile(Path(path)) as file:
                torch.save(state_dict, cast(IO[bytes], file))
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            self.error = cause
            return
        self.written[Path(path).name] = FileRecord(size=file.size, crc32=file.checksum)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file.

        Raises:
            CheckpointError: it is damaged or holds what could run code.
        """
        return _read(path, map_location=map_location)


def read_mapped(path: Path) -> Any:
    """Read one file; its tensors stay on the disk, and of them only what is used comes into memory.

    Raises:
        CheckpointError: it is damaged or holds what could run code.
    """
    return _read(str(path), map_location="cpu", mmap=True)


def _read(path: str, **how: Any) -> Any:
    try:
        with torch.serialization.safe_globals(KNOWN):
            return torch.load(path, weights_only=True, **how)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{path}: refused, it holds more than DeepSpeed writes and could run code") from None
    except Exception as error:  # the unpickler meets broken bytes with errors of many kinds
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: cannot be read: {reason}") from None

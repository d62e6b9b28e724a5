"""Reading back what was written, from the disk and not from the memory that the system kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from common.whole_files import sync
from models.checkpoint.parallel import write_behind
from models.checkpoint.source import same_bytes
from models.errors import CheckpointError


def compare(path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> int:
    """Compare tensors bit for bit; gives the number of bytes compared.

    Raises:
        CheckpointError: one differs.
    """
    for name, tensor in expected.items():
        if not same_bytes(found[name], tensor):
            raise CheckpointError(f"{path.name}: {name} was read back otherwise than written; nothing was changed")
    return sum(tensor.nbytes for tensor in expected.values())


def forget_cached(path: Path) -> None:
    """Bring a file onto the disk and drop the system's copy in memory, so that the next read is a real one."""
    sync(path)
    write_behind(path)

"""Looking at tensors on their way: whether one holds NaN, and whether it lies on the disk as it was written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.whole_files import sync
from models.checkpoint.parallel import in_parallel, write_behind
from models.errors import CheckpointError

logger = logging.getLogger("pipetune")


def warn_of_nan(state: Mapping[str, Tensor], describe: Callable[[str], str]) -> None:
    """Say so where a weight is no number, and `describe` where it lies; the conversion or the run goes on."""
    for name, found in zip(state, in_parallel(_has_nan, state.values()), strict=True):
        if found:
            logger.warning("warning: %s holds NaN: every loss of a model with this weight would be NaN", describe(name))


def _has_nan(tensor: Tensor) -> bool:
    """Whether a tensor holds a NaN. A sum is the fastest look; only where it is NaN too is each number looked at."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.to(torch.float16)  # torch adds up no eight bits
    return tensor.is_floating_point() and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def check_range(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise a CheckpointError where a number is too large for the dtype that a tensor is to be written in."""
    if not (dtype.is_floating_point and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max):
        return
    if bool((tensor.to(dtype).isinf() & tensor.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{name}: holds numbers that are too large for {kind}; expected --dtype bf16 or fp32")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype and bits: NaN equals NaN here, and -0.0 differs from 0.0."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).contiguous().view(torch.uint8), other.reshape(-1).contiguous().view(torch.uint8)
    )


def compare(path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> int:
    """Compare tensors bit for bit: the number of bytes compared, or a CheckpointError where one differs."""
    for name, tensor in expected.items():
        if not same_bytes(found[name], tensor):
            raise CheckpointError(f"{path.name}: {name} was read back otherwise than written; nothing was changed")
    return sum(tensor.nbytes for tensor in expected.values())


def forget_cached(path: Path) -> None:
    """Bring a file onto the disk and drop the system's copy in memory, so that the next read is a real one."""
    sync(path)
    write_behind(path)

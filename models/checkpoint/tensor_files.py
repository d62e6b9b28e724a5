"""Reading tensors from one weight file, lazily and without ever running what is inside.

safetensors files are read tensor by tensor; .bin and layer files are torch zip archives, mapped into memory and
unpickled with `weights_only=True`, which knows tensors and containers and refuses everything else.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from common.terminal import reason_of
from models.checkpoint.layout import not_found
from models.checkpoint.safetensors_files import DTYPE_NAMES, SafetensorsFile, TensorInfo
from models.errors import GONE, CheckpointError, reading


class MappedFile:
    """A torch archive, mapped into memory: what was touched counts as memory until the last tensor is gone."""

    def __init__(self, path: Path) -> None:
        self._state = load_state_dict(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo.of(self._state[name])

    def read(self, name: str) -> Tensor:
        return self._state[name]


TensorFile = SafetensorsFile | MappedFile  # of named tensors, read when they are asked for; KeyError for other names


def open_tensors(path: Path) -> TensorFile:
    """Open a weight file of either kind.

    Raises:
        CheckpointError: the file is missing, truncated or no weight file, or a pickle that holds more than tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: not found; the folder is incomplete")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else MappedFile(path)


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """The state dict in a torch archive, memory-mapped.

    Raises:
        CheckpointError: as `load_archive`, or not a dict of plain tensors.
    """
    state = load_archive(path)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise CheckpointError(f"{path}: expected a dict of names and tensors")
    for name, tensor in state.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
            kind = f"{tensor.dtype}, {'nested' if tensor.is_nested else tensor.layout}, on {tensor.device}"
            raise CheckpointError(f"{path}: {name} is no plain tensor ({kind}); expected dense numbers that it holds")
    return state


def load_archive(path: Path) -> Any:
    """What is in a torch archive, memory-mapped: tensors, containers, and what the caller has declared safe.

    Raises:
        CheckpointError: missing, damaged, refused or not readable.
    """
    try:
        with reading(path):
            mapped = is_zipfile(path)  # archives from before torch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except GONE:
        raise not_found(path) from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: refused, the pickle holds more than tensors and could run code; expected a plain state dict"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # the unpickler meets broken bytes with errors of many kinds
        raise CheckpointError(f"{path}: damaged or not a weight file: {reason_of(error)}") from None


def has_nan(tensor: Tensor) -> bool:
    """Whether a tensor holds a NaN. A sum is the fastest look; only where it is NaN too is each number looked at."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.to(torch.float16)  # torch adds up no eight bits
    return tensor.is_floating_point() and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())

"""Reading tensors from one weight file, lazily and without ever running what is inside.

safetensors files are read tensor by tensor; .bin and layer files are torch zip archives, mapped into memory and
unpickled with `weights_only=True`, which knows tensors and containers and refuses everything else.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import CheckpointError


def open_tensors(path: Path) -> Mapping[str, Tensor]:
    """A mapping from tensor name to tensor; nothing is read until a tensor is asked for.

    Raises:
        CheckpointError: the file is missing, truncated or no weight file, or a pickle that holds more than tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: not found; the folder is incomplete")
    if path.suffix == ".safetensors":
        return _SafetensorsFile(path)
    return load_state_dict(path)


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """The state dict in a torch archive, memory-mapped.

    Raises:
        CheckpointError: missing, damaged, refused, or not a dict of tensors.
    """
    try:
        state: Any = _torch_load(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; the folder is incomplete") from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: refused, the pickle holds more than tensors and could run code; expected a plain state dict"
        ) from None
    except Exception as error:  # the unpickler meets broken bytes with errors of many kinds
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(f"{path}: damaged or not a weight file: {reason}") from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise CheckpointError(f"{path}: expected a dict of names and tensors")
    return state


def save_state_dict(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a layer as DeepSpeed does.

    Raises:
        OSError: the disk is full or cannot be written; torch itself hides that behind a RuntimeError.
    """
    try:
        with open(path, "wb") as file:
            torch.save({name: tensor.clone() for name, tensor in state.items()}, file)
    except RuntimeError as error:
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(errno.EIO, str(error)) from None


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # Archives from before torch 1.6 cannot be mapped; they are read whole, as safely.
        return torch.load(path, map_location="cpu", weights_only=True)


class _SafetensorsFile(Mapping[str, Tensor]):
    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or truncated: {error}") from None
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError:
            raise KeyError(name) from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

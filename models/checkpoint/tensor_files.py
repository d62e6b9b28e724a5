"""Read and write weight files tensor by tensor: safetensors, and archives of torch.

A safetensors file (https://huggingface.co/docs/safetensors) is eight bytes of header length, a JSON header with every
tensor's dtype, shape and place, then the raw bytes. The library's `save_file` needs all tensors of a file at once, and
its `safe_open` keeps all that was read in memory while the file is open: 5 GB for one of 5 GB. Opened anew for each
tensor, it reads the header each time: 100 s for a file of 6,000 experts, which takes 1.6 s here. So the library only
checks a file; each tensor is then mapped, and unmapped, by itself. Writing begins with the headers; the tensors follow
in any order.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO
from weakref import finalize

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from common.terminal import reason_of
from common.whole_files import regular
from models.checkpoint.layout import not_found
from models.checkpoint.tensor_io import write_behind
from models.errors import GONE, CheckpointError, reading

DTYPES: dict[str, torch.dtype] = {**str_to_torch_dtype, "F8_E8M0": torch.float8_e8m0fnu}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 64 * 2**20  # bytes a write; a call takes 2 GB at most


@dataclass(frozen=True)
class TensorInfo:
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One safetensors file, open for reading as long as this object lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, int] = {}
        try:
            self._file = regular(str(path), os.O_RDONLY)
            finalize(self, os.close, self._file)
            with safe_open(path, framework="pt"):  # the library checks the header and the file's length
                pass
            length = int.from_bytes(os.pread(self._file, 8, 0), "little")
            header = json.loads(os.pread(self._file, length, 8))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged or truncated: {error}") from None

        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{path}: {name} has dtype {entry['dtype']}; expected {', '.join(DTYPES)}")
            self._infos[name] = TensorInfo(DTYPES[entry["dtype"]], torch.Size(entry["shape"]))
            self._places[name] = 8 + length + entry["data_offsets"][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> Tensor:
        """Map a tensor; changes of it stay in memory."""
        info = self._infos[name]
        if not info.nbytes:
            return torch.empty(info.shape, dtype=info.dtype)
        begin = self._places[name]
        before = begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._file, before + info.nbytes, offset=begin - before, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_WILLNEED)
        return torch.frombuffer(mapped, dtype=info.dtype, offset=before).reshape(info.shape)


class SafetensorsWriter:
    """Write safetensors files whose names, dtypes and shapes are known ahead."""

    def __init__(self, folder: Path, files: dict[str, list[str]], infos: dict[str, TensorInfo]) -> None:
        self.infos = infos
        self._handles: list[BinaryIO] = []
        self._places: dict[str, tuple[int, int]] = {}
        for file, names in files.items():
            self._handles.append(open(folder / file, "wb", buffering=0))
            self._announce(self._handles[-1], names)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, cast to its announced dtype; threads may do so side by side."""
        descriptor, place = self._places.pop(name)
        tensor = tensor.detach().to(device="cpu", dtype=self.infos[name].dtype).contiguous()
        rest = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
        while rest:
            written = os.pwrite(descriptor, rest[:PIECE], place)
            place += written
            rest = rest[written:]

    def write_behind(self) -> None:
        """Start sending what was written to the disk."""
        for handle in self._handles:
            write_behind(Path(handle.name))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for handle in self._handles:
            handle.close()
        assert error is not None or not self._places, f"announced but never written: {sorted(self._places)}"

    def _announce(self, handle: BinaryIO, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        infos = [self.infos[name] for name in names]
        offsets = [0, *accumulate(info.nbytes for info in infos)]
        for name, info, place in zip(names, infos, pairwise(offsets), strict=True):
            header[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": place}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of eight bytes, as the format asks
        handle.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, offset in zip(names, offsets, strict=False):
            self._places[name] = (handle.fileno(), 8 + len(encoded) + offset)


class MappedFile:
    """A torch archive mapped into memory; its pages that were read count as memory while it lives."""

    def __init__(self, path: Path) -> None:
        self._state = load_archive(path)
        pairs = self._state.items() if isinstance(self._state, dict) else [(None, None)]
        if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs):
            raise CheckpointError(f"{path}: expected a dict of names and tensors")
        for name, tensor in self._state.items():
            has_numbers = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
            if not has_numbers or tensor.dtype not in DTYPE_NAMES:
                kind = f"{tensor.dtype}, {'nested' if tensor.is_nested else tensor.layout}, on {tensor.device}"
                raise CheckpointError(f"{path}: {name} is no plain tensor ({kind}); expected dense numbers")

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._state[name].dtype, self._state[name].shape)

    def read(self, name: str) -> Tensor:
        return self._state[name]


def load_archive(path: Path) -> Any:
    """Load a torch archive, memory-mapped and unpickled with `weights_only`; CheckpointError where that fails."""
    try:
        with reading(path), open(path, "rb", opener=regular) as file:
            mapped = zipfile.is_zipfile(file)  # archives from before torch 1.6 cannot be mapped
            if not mapped and os.pread(file.fileno(), 2, 0) == b"PK":  # as zip archives begin
                raise CheckpointError(f"{path}: cut short: the archive has no end; expected the whole file")
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except GONE:
        raise not_found(path) from None
    except pickle.UnpicklingError:
        problem = "refused, the pickle holds more than tensors and could run code"
        raise CheckpointError(f"{path}: {problem}; expected a plain state dict") from None
    except CheckpointError:
        raise
    except Exception as error:  # the unpickler meets broken bytes with errors of many kinds
        raise CheckpointError(f"{path}: damaged or not a weight file: {reason_of(error)}") from None


def save_state_dict(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a layer; raise OSError on a full disk, where torch raises RuntimeError."""
    # A tensor that is a part of a larger one would drag the whole of it into the file.
    own = {
        name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for name, tensor in state.items()
    }
    with os_errors(), open(path, "wb") as file:
        torch.save(own, file)


@contextmanager
def os_errors() -> Iterator[None]:
    """Raise the OSError behind a RuntimeError of `torch.save`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise

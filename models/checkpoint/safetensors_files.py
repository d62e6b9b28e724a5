"""Reading and writing safetensors files tensor by tensor.

The format (https://huggingface.co/docs/safetensors) is eight bytes of header length, a JSON header with every tensor's
dtype, shape and place, then the raw bytes. The library's own `save_file` wants all tensors of a file at once, and its
`safe_open` keeps what was read in memory as long as the file is open: for a 5 GB shard either is 5 GB. Here the library
checks a file when it is opened; each tensor is then a mapping of its own part of the file, which goes with the tensor.
Tensors are written to their place in any order once the headers are down.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO
from weakref import finalize

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from common.whole_files import regular
from models.checkpoint.parallel import write_at, write_behind
from models.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {**str_to_torch_dtype, "F8_E8M0": torch.float8_e8m0fnu}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One safetensors file, open for reading as long as this object lives.

    Raises:
        CheckpointError: the file cannot be read, is truncated, damaged, or holds a dtype that torch does not have.
    """

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
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{path}: {name} has dtype {entry['dtype']}; expected {', '.join(DTYPES)}")
            self._infos[name] = TensorInfo(DTYPES[entry["dtype"]], torch.Size(entry["shape"]))
            self._places[name] = 8 + length + entry["data_offsets"][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor; KeyError where there is none of this name."""
        return self._infos[name]

    def read(self, name: str) -> Tensor:
        """A tensor; its bytes are read from the disk when they are used, and a change of them stays in memory.

        Raises KeyError as `info`.
        """
        info = self._infos[name]
        if not info.nbytes:
            return torch.empty(info.shape, dtype=info.dtype)
        begin = self._places[name]
        before = begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._file, before + info.nbytes, offset=begin - before, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_WILLNEED)
        return torch.frombuffer(mapped, dtype=info.dtype, offset=before).reshape(info.shape)


class SafetensorsWriter:
    """Writes a set of safetensors files whose contents are announced up front: the names of each file's tensors, in
    order, and each tensor's dtype and shape.
    """

    def __init__(self, folder: Path, files: dict[str, list[str]], infos: dict[str, TensorInfo]) -> None:
        self.infos = infos
        self._handles: list[BinaryIO] = []
        self._places: dict[str, tuple[int, int]] = {}
        for file, names in files.items():
            self._handles.append(open(folder / file, "wb", buffering=0))
            self._announce(self._handles[-1], names)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor in its place, cast to the announced dtype; threads may do so side by side."""
        descriptor, place = self._places.pop(name)
        write_at(descriptor, place, tensor.detach().to(device="cpu", dtype=self.infos[name].dtype))

    def write_behind(self) -> None:
        """Send what was written so far on to the disk."""
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

"""torch's archives (.bin and layer files): read lazily and without ever running what is inside, written by threads.

An archive is mapped into memory and unpickled with `weights_only=True`, which knows tensors and containers and refuses
everything else.

`torch.save` puts one tensor after the other and computes their checksums on one core, which is slower than most disks.
Here it writes the frame of the archive alone (a zip file whose entries are stored as they are), and threads fill in the
tensors, each with its checksum. The file is what `torch.save` would have written, and any zip tool reads it.
"""

from __future__ import annotations

import errno
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.terminal import reason_of
from common.whole_files import regular
from models.checkpoint.layout import not_found
from models.checkpoint.parallel import checksum, in_parallel, write_at
from models.checkpoint.safetensors_files import DTYPE_NAMES, TensorInfo
from models.errors import GONE, CheckpointError, reading

# The zip format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7 to 4.3.12.
LOCAL = struct.Struct("<26xHH")  # lengths of the name and the extra field, which stand between it and the bytes
DESCRIPTOR = struct.Struct("<4sL")  # behind the bytes: a signature and the checksum, then sizes
CENTRAL = struct.Struct("<16xL8xHHH12x")  # checksum; lengths of the name, the extra field and the comment behind it
CENTRAL_CHECKSUM = 16  # where it stands in its entry


class MappedFile:
    """A torch archive, mapped into memory: what was touched counts as memory until the last tensor is gone.

    Raises:
        CheckpointError: as `load_archive`, or not a dict of plain tensors.
    """

    def __init__(self, path: Path) -> None:
        self._state = load_archive(path)
        pairs = self._state.items() if isinstance(self._state, dict) else [(None, None)]
        if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs):
            raise CheckpointError(f"{path}: expected a dict of names and tensors")
        for name, tensor in self._state.items():
            has_numbers = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
            if not has_numbers or tensor.dtype not in DTYPE_NAMES:
                kind = f"{tensor.dtype}, {'nested' if tensor.is_nested else tensor.layout}, on {tensor.device}"
                raise CheckpointError(
                    f"{path}: {name} is no plain tensor ({kind}); expected dense numbers that it holds"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._state[name].dtype, self._state[name].shape)

    def read(self, name: str) -> Tensor:
        return self._state[name]


def load_archive(path: Path) -> Any:
    """What is in a torch archive, memory-mapped: tensors, containers, and what the caller has declared safe.

    Raises:
        CheckpointError: missing, damaged, refused or not readable.
    """
    try:
        with reading(path), open(path, "rb", opener=regular) as file:
            mapped = zipfile.is_zipfile(file)  # archives from before torch 1.6 cannot be mapped
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


def save_state_dict(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a layer; an OSError where the disk is full or cannot be written, which torch hides in a RuntimeError."""
    # A tensor that is a part of a larger one would drag the whole of it into the file.
    own = {
        name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for name, tensor in state.items()
    }
    _write_frame(own, path)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        directory = archive.start_dir
    # torch numbers the storages as it meets them; tensors that share one have one entry.
    storages = {tensor.data_ptr(): tensor.untyped_storage() for tensor in own.values() if tensor.nbytes}
    places = [entry for entry in entries if "/data/" in entry.filename and entry.file_size]
    descriptor = os.open(path, os.O_RDWR)
    try:
        in_parallel(lambda pair: _fill(descriptor, *pair), zip(places, storages.values(), strict=True))
        _write_checksums(descriptor, directory, entries)
    finally:
        os.close(descriptor)


def _write_frame(state: dict[str, Tensor], path: Path) -> None:
    """Everything but the tensors, whose places stay holes."""
    try:
        with open(path, "wb") as file, torch.serialization.skip_data():
            torch.save(state, file)
    except RuntimeError as error:
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(errno.EIO, str(error)) from None


def _fill(descriptor: int, entry: zipfile.ZipInfo, storage: torch.UntypedStorage) -> None:
    content = torch.empty(0, dtype=torch.uint8).set_(storage)
    lengths = LOCAL.unpack(os.pread(descriptor, LOCAL.size, entry.header_offset))
    begin = entry.header_offset + LOCAL.size + sum(lengths)
    write_at(descriptor, begin, content)
    entry.CRC = checksum(content)
    os.pwrite(descriptor, DESCRIPTOR.pack(b"PK\x07\x08", entry.CRC), begin + entry.file_size)


def _write_checksums(descriptor: int, directory: int, entries: list[zipfile.ZipInfo]) -> None:
    """Put the checksums into the list of contents at the end of the archive."""
    for entry in entries:
        _, *lengths = CENTRAL.unpack(os.pread(descriptor, CENTRAL.size, directory))
        os.pwrite(descriptor, struct.pack("<L", entry.CRC), directory + CENTRAL_CHECKSUM)
        directory += CENTRAL.size + sum(lengths)

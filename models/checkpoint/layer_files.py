"""Writing a layer's state dict as torch does, with several threads.

`torch.save` writes one tensor after the other through one core. Here it writes the archive's frame only
(`torch.serialization.skip_data`), and the bytes of the tensors go to their places in parallel. What comes out is an
archive like any other to `torch.load`; the zip checksums, which torch does not look at, are left unset.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.parallel import in_parallel, write_at

LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: 26 bytes, the lengths of its name and its extra field


def save_state_dict(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a layer as DeepSpeed does.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    frame = {name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in state.items()}
    with torch.serialization.skip_data(), open(path, "wb") as file:
        torch.save(frame, file)
    descriptor = os.open(path, os.O_RDWR)
    try:
        places = _places(path, descriptor, len(state))
        in_parallel(lambda item: write_at(descriptor, item[1], item[0]), list(zip(state.values(), places, strict=True)))
    finally:
        os.close(descriptor)


def _places(path: Path, descriptor: int, count: int) -> list[int]:
    """Where in the file the bytes of each tensor begin; torch numbers the storages in the order of the dict."""
    places = []
    with zipfile.ZipFile(path) as archive:
        root = archive.infolist()[0].filename.partition("/")[0]
        for number in range(count):
            header = archive.getinfo(f"{root}/data/{number}").header_offset
            name_length, extra_length = LOCAL_HEADER.unpack(os.pread(descriptor, LOCAL_HEADER.size, header))
            places.append(header + LOCAL_HEADER.size + name_length + extra_length)
    return places

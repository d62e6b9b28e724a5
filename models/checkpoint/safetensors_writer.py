"""Writing safetensors files tensor by tensor.

The library's own `save_file` wants all tensors of a file at once, which for a 5 GB shard is 5 GB of memory. The format
(https://huggingface.co/docs/safetensors) is simple enough to stream: eight bytes of header length, a JSON header with
every tensor's dtype, shape and place, then the raw bytes. All of that is known before the first tensor is read, so the
headers go first and each tensor is written where it belongs, in any order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes a set of safetensors files whose contents are announced up front.

    Args:
        folder: where the files go.
        files: file name -> names of its tensors, in order.
        infos: tensor name -> dtype and shape.
    """

    def __init__(self, folder: Path, files: dict[str, list[str]], infos: dict[str, TensorInfo]) -> None:
        self.infos = infos
        self._handles: list[BinaryIO] = []
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        for file, names in files.items():
            handle = open(folder / file, "wb")
            self._handles.append(handle)
            self._announce(handle, names)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor in its place, cast to the announced dtype."""
        handle, offset = self._places.pop(name)
        info = self.infos[name]
        data = tensor.detach().to(device="cpu", dtype=info.dtype).contiguous()
        handle.seek(offset)
        handle.write(data.reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.close()
        assert error is not None or not self._places, f"announced but never written: {sorted(self._places)}"

    def _announce(self, handle: BinaryIO, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        end = 0
        for name in names:
            info = self.infos[name]
            offsets[name] = end
            end += info.nbytes
            header[name] = {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offsets[name], end],
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of eight bytes, as the format asks
        handle.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, offset in offsets.items():
            self._places[name] = (handle, 8 + len(encoded) + offset)

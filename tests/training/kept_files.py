"""What a disk, or a fault, makes of the files that a run keeps (`common.kept_arrays`)."""

from __future__ import annotations

from pathlib import Path

import numpy
import xxhash
from numpy.typing import NDArray

from common.kept_arrays import SUM


def parts_of(path: Path) -> tuple[bytes, bytes]:
    """The bytes of an array, and what its file says of its maker."""
    content = path.read_bytes()
    end = content.rindex(b'[["')
    return content[:end], content[end:-SUM]


def forge(path: Path, values: NDArray[numpy.generic]) -> None:
    """Give a kept array other numbers, and the sum that they have."""
    whole = values.tobytes() + parts_of(path)[1]
    path.write_bytes(whole + xxhash.xxh3_128(whole).digest())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[6] ^= 64
    path.write_bytes(content)


def swap(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:8], content[8:16] = content[8:16], content[:8]
    path.write_bytes(content)


def shift(path: Path) -> None:
    forge(path, numpy.frombuffer(parts_of(path)[0], numpy.float32) * numpy.float32(1.01))


def fill(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[: len(parts_of(path)[0])] = b"\x7f" * len(parts_of(path)[0])
    path.write_bytes(content)

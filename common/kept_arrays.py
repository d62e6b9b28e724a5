"""Keep arrays that were expensive to compute: each known by all that made it, whole or not there, with a sum.

A file begins with the array's bytes, so that it can be mapped. One that is damaged, or was made of something else, is
not taken. Any number of processes that want one array agree by a lease who computes it (`common.lease`).

Cost: a pass over the file when it is opened, 5 GB a second and more where the disk is as fast.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy
import xxhash
from numpy.typing import NDArray

from common.whole_files import kept, regular, replacing

BLOCK = 2**22  # bytes read at a time
SUM = 16  # bytes


class KeptArray(NamedTuple):
    """Name an array and what made it. The file holds its bytes, what made it, and a sum of both.

    Attributes:
        made_of: all that its numbers depend on, in values that JSON knows.
    """

    path: Path
    made_of: Any
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return numpy.dtype(self.dtype).itemsize * int(numpy.prod(self.shape))

    def find(self) -> NDArray[Any] | None:
        """Map the array, if it is there and whole; warn of a file that cannot be used."""
        return kept(self.path, lambda array: array, self._check)

    def map(self) -> NDArray[Any]:
        """Map the array, which was found or written before."""
        if not self.n_bytes:  # nothing can be mapped of an empty file
            return numpy.empty(self.shape, self.dtype)
        return numpy.memmap(self.path, self.dtype, "r", shape=self.shape)

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """Open a file to write the bytes, in any order; the array is there when the block ends without an error."""
        with replacing(self.path, f"partial-{secrets.token_hex(4)}") as file:
            yield file
            file.seek(self.n_bytes)
            file.truncate()
            file.write(self._label)
            file.write(_sum(file))

    def write(self, values: NDArray[Any]) -> None:
        """Keep an array that fits into memory."""
        with self.writing() as file:
            file.write(values.astype(self.dtype).tobytes())

    def sweep(self) -> None:
        """Remove what killed writers left; for the one process that may write."""
        for left in self.path.parent.glob(f".{self.path.name}.partial-*"):
            left.unlink(missing_ok=True)

    @property
    def _label(self) -> bytes:
        return json.dumps([self.made_of, self.dtype, self.shape], sort_keys=True).encode()

    def _check(self, path: Path) -> NDArray[Any]:
        label = self._label
        with open(path, "rb", opener=regular) as file:
            if os.fstat(file.fileno()).st_size != self.n_bytes + len(label) + SUM:
                raise ValueError("damaged, or of something else")
            file.seek(self.n_bytes)
            same = file.read(len(label)) == label
            if not (same and _sum(file, SUM) == file.read(SUM)):
                raise ValueError("damaged, or of something else")
        return self.map()


def _sum(file: BinaryIO, rest: int = 0) -> bytes:
    """Sum a file from its beginning to the last `rest` bytes, and stay there."""
    digest, left = xxhash.xxh3_128(), file.seek(0, os.SEEK_END) - rest
    file.seek(0)
    while left:
        block = file.read(min(BLOCK, left))
        digest.update(block)
        left -= len(block)
    return digest.digest()

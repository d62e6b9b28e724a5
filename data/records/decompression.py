"""The bytes of a file, unpacked where it is compressed by gzip or zstd.

Compression is found by the mark that such a file begins with, whatever its name. Of a file that is cut or damaged, all
that can be unpacked comes out first. Memory: a chunk of 1 MiB; a block of zstd that was made to burst grows to 128 MiB.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

CHUNK = 1 << 20  # bytes read at once
ZSTD_CHUNK = 4 << 10  # compressed bytes: few, as each may hold megabytes

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Unpacked(io.RawIOBase):
    """A file's bytes up to where it cannot be read any further; why not goes into `damage`."""

    def __init__(self, file: Path) -> None:
        self.damage: list[str] = []
        self._chunks = _unpacked(file)
        self._chunk = io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, all of it unless the file ends."""
        size = 0
        while size < len(buffer):
            taken = self._chunk.readinto(buffer[size:])
            size += taken
            if not taken and not self._next():
                break
        return size

    def _next(self) -> bool:
        try:
            chunk = next(self._chunks, b"")
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            self.damage.append(f"cannot be read to its end, records may be missing: {' '.join(str(error).split())}")
            return False
        self._chunk = io.BytesIO(chunk)
        return bool(chunk)


def _unpacked(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        mark = stream.peek(4)[:4]
        if mark.startswith(GZIP):
            plain = gzip.GzipFile(fileobj=stream)
            yield from iter(lambda: plain.read1(CHUNK), b"")
        elif mark == ZSTD:
            yield from _unzstd(stream)
        else:
            yield from iter(lambda: stream.read(CHUNK), b"")


def _unzstd(stream: BinaryIO) -> Iterator[bytes]:
    """The library's own reader takes a cut frame for a whole one; here its end has to come."""
    frame = None
    for compressed in iter(lambda: stream.read(ZSTD_CHUNK), b""):
        rest = compressed
        while rest:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if plain := frame.decompress(rest):
                yield plain
            rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")

"""Read a file's bytes, unpacking gzip and zstd, and name files without records.

Compression is detected by the file's magic bytes, not its name. Of a file that is cut or damaged, all that
can be unpacked comes out first. Memory: a chunk of 1 MB; a block of zstd that was made to burst grows to 134 MB.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

CHUNK = 1 << 20  # bytes read at once
ZSTD_CHUNK = 4 << 10  # compressed bytes: few, as each may hold megabytes

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of zstd that holds no data
ARCHIVE = "expected it unpacked"
SURROGATE = re.compile("[\ud800-\udfff]")  # what Python makes of a byte that is no UTF-8
MARKS: dict[bytes | tuple[bytes, ...], tuple[str, str]] = {
    b"PK\x03\x04": ("a zip archive", ARCHIVE),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", ARCHIVE),
    b"Rar!": ("a rar archive", ARCHIVE),
    b"BZh": ("compressed by bzip2", "expected it unpacked, or gzip or zstd"),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "expected it unpacked, or gzip or zstd"),
    b"\xfd7zXZ\0": ("compressed by xz", "expected it unpacked, or gzip or zstd"),
    b"\xd0\xcf\x11\xe0": ("an old Office document", "expected a spreadsheet saved as CSV in UTF-8"),
    (b"\x89PNG", b"\xff\xd8\xff", b"GIF8"): ("an image", "expected records"),
    b"%PDF": ("a PDF", "expected its text"),
    (b"\x80\x02", b"\x80\x04", b"\x80\x05"): ("a pickle, which is never opened", "expected JSON, CSV or Parquet"),
    b"SQLite format 3": ("a database", "expected a table of it saved as CSV in UTF-8"),
    b"version https://git-lfs": ("a pointer of Git LFS, not the file", "expected it after git lfs pull"),
}
SPREADSHEET, OFFICE = b"xl/", b"[Content_Types].xml"
TAR = (257, b"ustar")
HTML = re.compile(rb"\s*<(!doctype html|html|head|body)\b", re.IGNORECASE)
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
LOOKED_AT = 200  # bytes: in UTF-16, of most texts every other one is NUL


class Unpacked(io.RawIOBase):
    """Read a file's bytes until the end or an error, which goes into `damage`."""

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
        elif mark == ZSTD or SKIPPABLE.match(mark):
            yield from _unzstd(stream)
        else:
            yield from iter(lambda: stream.read(CHUNK), b"")


def _unzstd(stream: BinaryIO) -> Iterator[bytes]:
    """Unpack zstd and report a cut frame, which the library's own reader accepts."""
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


def foreign(head: bytes, named_text: bool) -> str | None:
    """Describe a file that holds no records and what is expected; None if it may hold some.

    Args:
        head: its first bytes.
        named_text: whether its name says plain text, which may hold anything.
    """
    if head.startswith(b"PK\x03\x04") and (SPREADSHEET in head or OFFICE in head):
        return "is a spreadsheet or another Office document; expected it saved as CSV in UTF-8"
    found = next((kind for mark, kind in MARKS.items() if head.startswith(mark)), None)
    if found is None and head[TAR[0] :].startswith(TAR[1]):
        found = "a tar archive", ARCHIVE
    if found is None and not named_text and HTML.match(head):
        found = "an HTML page", "expected the file itself, by its link for downloading"
    if found:
        return f"is {found[0]}; {found[1]}"
    pairs = head[:LOOKED_AT]
    even, odd = pairs[::2], pairs[1::2]
    wide = (all(even) and not any(odd)) or (all(odd) and not any(even))
    if (len(pairs) >= 4 and wide) or (head.startswith(UTF16_MARKS) and b"\0" in head):
        return "is in UTF-16; expected UTF-8"
    return None

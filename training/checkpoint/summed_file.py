"""A file that sums up what is written to it and has the disk at work meanwhile.

Left alone, the system collects what is written in memory, and whoever needs it on the disk waits for all of it at the
end. The CRC-32 is summed up by a thread of its own at 4 GB/s, while the same bytes are written.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from models.checkpoint.parallel import write_behind

PIECE = 64 * 2**20  # bytes after which the disk is set to work


class SummedFile:
    """A new file for `torch.save`.

    Attributes:
        size: bytes written so far.
        checksum: their CRC-32.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "wb", buffering=0)
        self._summing = ThreadPoolExecutor(1)
        self._unsent = 0
        self.size = 0
        self.checksum = 0

    def write(self, data: Any) -> int:
        """Write all of it.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        content = memoryview(data)
        checksum = self._summing.submit(zlib.crc32, content, self.checksum)
        try:
            self._write(content)
        finally:
            self.checksum = checksum.result()  # torch takes its memory back when this returns
        self.size += len(content)
        return len(content)

    def _write(self, rest: memoryview) -> None:
        while rest:
            written = self._file.write(rest[:PIECE])
            rest = rest[written:]
            self._unsent += written
            if self._unsent >= PIECE:
                self._send()

    def flush(self) -> None:
        """Nothing waits here."""

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._summing.shutdown()
        self._send()

    def _send(self) -> None:
        write_behind(self._path)
        self._unsent = 0

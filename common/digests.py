"""Remember the digests of files, so that a second start reads none of them.

A note holds as long as the files' sizes and their times of modification and of change stay the same. The second time
cannot be set by hand, so a file that was replaced by an equally old one is noticed too. Files that were written within
the last seconds are not remembered: they may change once more within the same tick of the clock.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.whole_files import kept, replace_checked

SETTLED = 3.0  # seconds without a write
BLOCK = 4 * 2**20  # bytes read at a time


def stamp(path: Path) -> list[int]:
    """Return what changes whenever a file does: size in bytes, modification and change times in ns."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def file_digest(path: Path, count: Callable[[int], Any] = lambda _: None) -> str:
    """Read a file whole and return its digest.

    Args:
        count: called with the number of bytes after each block.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            count(len(block))
    return digest.hexdigest()


class Digests:
    """Keep a small note of each digest in a folder.

    Args:
        what: what the digests are of, where several kinds lie in one folder.
    """

    def __init__(self, folder: Path, what: str = "") -> None:
        self._folder, self._what = folder, what

    def known(self, paths: Sequence[Path]) -> str | None:
        """Return the digest of files that have not changed; None if it has to be taken."""
        return kept(self._note(paths), bytes.decode)

    def take(self, paths: Sequence[Path], digest: Callable[[], str]) -> str:
        """Compute the digest of files, and remember it.

        Raises:
            OSError: a file cannot be read.
        """
        note = self._note(paths)
        found = digest()

        last_change = max(max(stamp(path)[1:]) for path in paths)
        if note == self._note(paths) and time.time() - last_change / 1e9 > SETTLED:
            with suppress(OSError):  # without a place to keep it, it is taken again the next time
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_checked(note, found, secrets.token_hex(4))
        return found

    def _note(self, paths: Sequence[Path]) -> Path:
        """Name the note of files as they are now; changed files have another one."""
        known = [self._what, *((os.fsencode(path.resolve()).hex(), stamp(path)) for path in paths)]
        return self._folder / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}.checked"

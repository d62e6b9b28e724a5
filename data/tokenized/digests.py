"""Digests of files' contents, remembered so that a second start reads no data.

A remembered digest holds as long as the file's size and its times of modification and of change stay the same. The
second time cannot be set by hand, so a file that was replaced by an older or equally old one is noticed too. A file
that was written within the last seconds is not remembered: it may change once more within the same tick of the clock.

Cost: 1 s for each GB at the first start, a few microseconds later.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.whole_files import replace_text
from data.errors import DataError

BLOCK = 4 * 2**20  # bytes read at a time
SETTLED = 3.0  # seconds without a write

Stamp = list[int]


def stamp(path: Path) -> Stamp:
    """What changes whenever the file does: size in bytes, modification and change times in ns.

    Raises:
        DataError: there is no such file.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


class Digests:
    """The digests known in a cache folder.

    Args:
        folder: one small file for each data file is kept there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def known(self, path: Path) -> str | None:
        """The digest of a file that did not change since it was taken, as hex; None where it has to be taken."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(self._note(path).read_text(encoding="utf-8"))
            if note["path"] == str(path.resolve()) and note["stamp"] == stamp(path):
                return str(note["digest"])
        return None

    def take(self, path: Path, told: Callable[[int], Any] = lambda _: None) -> str:
        """Read a file whole and give its digest.

        Args:
            told: called with the number of bytes after each block.

        Raises:
            DataError: the file cannot be read.
        """
        before = stamp(path)
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
                    told(len(block))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        age = time.time() - max(before[1:]) / 1e9
        if before == stamp(path) and age > SETTLED:
            note = {"path": str(path.resolve()), "stamp": before, "digest": digest.hexdigest()}
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(self._note(path), json.dumps(note), secrets.token_hex(4))
        return digest.hexdigest()

    def _note(self, path: Path) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"

"""Write a file as a whole: a kill or a power cut leaves either the old or the new one.

Costs one or two waits for the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

Kept = TypeVar("Kept")
Read = Callable[[Path], Any]
Tell = Callable[[str], object]


@contextmanager
def replacing(path: Path, tag: str = "partial") -> Iterator[BinaryIO]:
    """Open a file to write; it replaces `path` when the block ends without an error.

    Args:
        tag: end of its temporary name; several writers of one file need different ones.
    """
    partial = path.with_name(f".{path.name}.{tag}")
    try:
        with open(partial, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_text(path: Path, text: str, tag: str = "partial") -> None:
    """Write a small text file; see `replacing`."""
    with replacing(path, tag) as file:
        file.write(text.encode())


def regular(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=regular)`; raise OSError for a FIFO, device, socket or folder."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a regular file", path)
    return descriptor


def read_regular(path: Path) -> bytes:
    """Read a whole file; see `regular`."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def read_checked(path: Path) -> bytes:
    """Read what `replace_checked` wrote; raise ValueError where it is damaged, or another user's."""
    content = read_regular(path)
    if path.stat().st_uid != os.getuid():
        raise ValueError("of another user")
    text, _, known = content.rpartition(b"\n")
    if known != b"%08x" % zlib.crc32(text):
        raise ValueError("damaged")
    return text


@cache  # each line once, however often its file is looked at
def _warn(line: str) -> None:
    logging.getLogger("pipetune").warning("warning: %s", line)


def kept(path: Path, parse: Callable[[Any], Kept], read: Read = read_checked, tell: Tell = _warn) -> Kept | None:
    """Parse what an earlier start kept in a file, if anything; warn of a file that cannot be used, and ignore it."""
    try:
        return parse(read(path))
    except (OSError, ValueError) as error:
        plain = str(error) if type(error) is ValueError else getattr(error, "strerror", "")
        if not isinstance(error, FileNotFoundError):
            tell(f"{path}: ignored: {plain or 'damaged'}")
        return None


def replace_checked(path: Path, text: str, tag: str = "partial") -> None:
    """Write a small text file with a checksum as its last line; see `replacing`."""
    replace_text(path, f"{text}\n{zlib.crc32(text.encode()):08x}", tag)


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's list of names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not do so for folders
            raise
    finally:
        os.close(descriptor)


def checksum(paths: Iterable[Path]) -> str:
    """Return the CRC-32 of files, one behind the other."""
    found = 0
    for path in sorted(paths):
        found = zlib.crc32(path.read_bytes(), found)
    return f"{found:08x}"

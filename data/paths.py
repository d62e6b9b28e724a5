"""Expand home folders in paths, and read small files whole."""

from __future__ import annotations

import errno
from pathlib import Path

from common.whole_files import regular
from data.errors import DataError

MOST_BYTES = 2**20  # far above any config or chat template


def expanded(path: str | Path) -> Path:
    """Replace `~` and `~user` in a path.

    Raises:
        DataError: nobody knows where that is.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{path}: no such user, or no home folder; expected a path without ~") from None


def with_home(path: str) -> str:
    """Expand a path given as text; one without `~` stays as it was written."""
    return str(expanded(path)) if path.startswith("~") else path


def read_small(path: str | Path) -> bytes:
    """Read a regular file's bytes; a pipe or a device might never end.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `MOST_BYTES`.
        ValueError: the path holds a NUL.
    """
    with open(path, "rb", opener=regular) as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MOST_BYTES / 1e6:.0f} MB")
    return content

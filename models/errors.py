"""The exception that a damaged or unsuitable checkpoint raises.

Its text is a single line for the user: which file, which tensor, what was expected. The entry points print it without a
traceback and exit with code 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GONE = (FileNotFoundError, NotADirectoryError)


class CheckpointError(ValueError):
    """A model folder cannot be used as it is."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise what the system says of a file or folder that is there and cannot be read as a CheckpointError."""
    try:
        yield
    except GONE:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}; nothing was changed") from None

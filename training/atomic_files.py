"""Replacing a file as a whole: either the old or the new one is there, whenever a process is killed or power fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from models.checkpoint.parallel import sync


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Write a small text file."""
    with replacing(path) as file:
        file.write(text.encode())

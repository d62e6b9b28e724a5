"""Folders that appear whole or not at all.

A writer works in a hidden sibling of its target and renames it last, so a killed conversion leaves nothing that looks
like a model. What a killed process left behind is removed by the next one on the same host.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.errors import CheckpointError

OLD = "-old"  # ends the name of a folder that waits for its successor


@contextmanager
def publish_folder(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into; on success it becomes `target`, on any error it is removed.

    Args:
        target: the folder to be; its parents are made.
        overwrite: replace an existing folder, which stays in place until the new one is whole.

    Raises:
        CheckpointError: `target` exists and may not be replaced, or the disk is full or read-only.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; expected a folder to write")
    if not overwrite and target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: exists and is not empty; choose another --save-path or add --overwrite")
    prefix = f".{target.name}.partial-{socket.gethostname()}-"
    partial = target.parent / f"{prefix}{os.getpid()}"
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            for stale in target.parent.glob(f"{prefix}*"):
                _clear(stale, target, prefix)
            partial.mkdir()
            yield partial
            _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Work on a folder that `publish_folder` is to publish, here or in another process.

    Raises:
        CheckpointError: in one line, what the system says of a full or read-only disk.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}; nothing was changed") from error


def _replace(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    old = partial.with_name(partial.name + OLD)
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _clear(stale: Path, target: Path, prefix: str) -> None:
    """Remove what a process left that is no more; a folder that it had moved aside goes back to its place."""
    if _is_running(stale.name.removeprefix(prefix).removesuffix(OLD)):
        return
    if stale.name.endswith(OLD) and not target.exists():
        stale.rename(target)
    else:
        shutil.rmtree(stale, ignore_errors=True)


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True

"""Write a folder so that it appears whole or not at all, and replaces nothing of a user's.

A writer works in a hidden folder beside its target. Its files are synced, a mark that lists them is added, and a rename
puts the folder into place, so neither a kill nor a power cut leaves anything that looks like a model.

Only a folder whose mark lists all that is in it is ever replaced: with another file, or one that changed since, it
belongs to a user. The old folder is renamed into the hidden one, checked again there, and removed last.

The hidden folder has a mark too, on which its writer holds a lock that the kernel drops when the writer ends. The next
writer of the same target removes hidden folders without a lock; those of another kernel must be untouched for a day. A
writer killed in its first or last moment leaves an empty mark or none, and the folder goes after a minute.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from common.lease import kernel_name, lock
from common.whole_files import read_regular, sync
from models.checkpoint.tensor_io import sync_files
from models.errors import CheckpointError

MARK = ".pipetune-files.json"
NEW, OLD = "new", "old"  # in the hidden folder: the folder being written, and the one that it replaces
ABANDONED = 24 * 3600.0  # seconds
UNMARKED = 60.0  # seconds; a writer needs far less to mark its folder


@contextmanager
def publish_folder(target: Path, overwrite: bool = False, kept: Iterable[Path] = ()) -> Iterator[Path]:
    """Create an empty folder to write; it becomes `target` on success, and is removed on failure.

    Args:
        target: its parents are created. Of a link, the folder that it points to.
        overwrite: replace a folder that Pipetune wrote, which stays in place until the new one is whole.
        kept: folders that `target` must not replace, nor any folder in them or around them.

    Raises:
        CheckpointError: `target` exists and may not be replaced, or the disk is full or read-only.
    """
    real = Path(os.path.realpath(target))
    needed = [Path(os.path.realpath(folder)) for folder in kept]
    with writing(real):
        sweep(real.parent.glob(f".{glob.escape(real.name)}.partial-*"))
        _check(real, overwrite, needed)
        real.parent.mkdir(parents=True, exist_ok=True)
        with hidden_folder(real) as new:
            old = new.with_name(OLD)
            if real.exists():
                _try_renaming(real, old)
            yield new
            _write_mark(new)
            _check(real, overwrite, needed)
            _replace(real, new, old, overwrite)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raise an OSError of the block, such as that of a full disk, as a CheckpointError."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename2 or error.filename or target)  # the file, where something else is in its place
        place = place if place.parent == target and not place.name.startswith(".") else target
        raise CheckpointError(f"{place}: cannot be written: {error.strerror or error}; nothing was changed") from error


def try_publishing(target: Path, kept: Iterable[Path]) -> None:
    """Check ahead whether `publish_folder` could overwrite a target; raise as it does."""
    with suppress(_Tried), publish_folder(target, True, kept):
        raise _Tried


class _Tried(Exception):
    """Nothing is to be published."""


def _check(target: Path, overwrite: bool, kept: list[Path]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target}: is a file; expected a folder to write")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{target}: exists and is not empty; choose another --save-path or add --overwrite")
    for folder in kept:
        linked = [Path(os.path.realpath(path)) for path in folder.iterdir() if path.is_symlink() and path.exists()]
        if _within(target, folder) or any(_within(path, target) for path in (folder, *linked)):
            raise CheckpointError(f"{target}: is not replaced, as {folder}, which is needed, shares files with it")
    if found := _foreign(target):
        raise CheckpointError(f"{target}: is not replaced, as {found}; expected another folder, or remove it yourself")


def _replace(target: Path, new: Path, old: Path, overwrite: bool) -> None:
    if overwrite and target.exists():
        target.rename(old)
        if found := _foreign(old):
            old.rename(target)
            raise CheckpointError(f"{target}: is not replaced, as {found} meanwhile; nothing was changed")
    try:
        new.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise CheckpointError(f"{target}: somebody else has made it meanwhile; it stays as it is") from None
    sync(target.parent)


def _write_mark(folder: Path) -> None:
    """Sync a folder, with the size and time of each file in its mark."""
    sync_files(folder)
    found = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in sorted(found.items())}
    (folder / MARK).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    sync(folder / MARK)
    sync(folder)


def _read_mark(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        mark = json.loads(read_regular(folder / MARK))
        if isinstance(mark, dict):
            return mark
    return {}


def _foreign(folder: Path) -> str | None:
    """Name what in a folder Pipetune did not write; None if nothing."""
    files = _read_mark(folder).get("files", {})
    parents = chain.from_iterable(Path(name).parents for name in files)
    folders = {parent.as_posix() for parent in parents}
    for path in sorted(folder.rglob("*")):
        name, stat = path.relative_to(folder).as_posix(), path.lstat()
        if name == MARK or (name in folders and path.is_dir() and not path.is_symlink()):
            continue
        if name not in files:
            return f"Pipetune did not write {name} in it"
        if files[name] != [stat.st_size, stat.st_mtime_ns]:
            return f"its {name} was changed"
    return None


def _within(inner: Path, outer: Path) -> bool:
    """Test whether a folder is another one or lies in it."""
    return any(os.path.samefile(each, outer) for each in (inner, *inner.parents))


def _try_renaming(target: Path, old: Path) -> None:
    """Check now, not after hours of work, whether a folder can be renamed."""
    try:
        target.rename(old)
    except OSError as error:
        reason = f"cannot be renamed, as a mount point ({error.strerror})"
        raise CheckpointError(f"{target}: {reason}; expected a folder in it, or another place") from None
    old.rename(target)


@contextmanager
def hidden_folder(target: Path) -> Iterator[Path]:
    """Create an empty folder inside a hidden one beside the target; remove both in the end."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        with open(work / MARK, "w", encoding="utf-8") as mark:
            with suppress(OSError):  # a file system without locks
                lock(mark, wait=True)
            json.dump({"kernel": kernel_name()}, mark)
            mark.flush()
            (work / NEW).mkdir()
            yield work / NEW
    finally:
        _clear(work)


def sweep(found: Iterable[Path]) -> None:
    """Remove hidden folders whose writers are gone."""
    for work in found:
        with suppress(OSError):
            age = time.time() - max(path.lstat().st_mtime for path in (work, *work.rglob("*")))
            kernel = _read_mark(work).get("kernel")
            if kernel is None and age > UNMARKED and {path.name for path in work.iterdir()} <= {MARK}:
                shutil.rmtree(work, ignore_errors=True)
            with open(work / MARK, "r+", encoding="utf-8") as mark:
                lock(mark, wait=False)
                if kernel == kernel_name() or age > ABANDONED:
                    _clear(work)


def _clear(work: Path) -> None:
    """Remove a hidden folder; put an old target in it back if its place is empty."""
    target = work.with_name(work.name[1:].rpartition(".partial-")[0])
    with suppress(OSError):
        if (work / OLD).exists() and not target.exists():
            (work / OLD).rename(target)
    if not (work / OLD).exists() or not _foreign(work / OLD):
        for part in (work / NEW, work / OLD, work):
            shutil.rmtree(part, ignore_errors=True)

"""Write files from several threads, start sending them to the disk early, and show progress.

A core copies about a gigabyte a second into the system's cache, which is less than most disks write; several threads
copy side by side, as Python releases its lock in each call.

Left alone, the system lets gigabytes of unwritten pages pile up, then stops every writer until it has found room. A
checkpoint that is sent to the disk as it is written, and leaves the cache behind it, gets there up to twice as fast
and pushes nothing else out of memory (`python -m benchmarks.convert` against cp).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from common.whole_files import sync

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKERS = min(4, os.cpu_count() or 1)


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call `work` on every item in threads; return results in order.

    `work` must not print or log: a progress bar's lock and the logger's, held by two threads, would deadlock.
    """
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, items))


@contextmanager
def byte_bar(what: str, total: int, shown: bool = True) -> Iterator[tqdm[NoReturn]]:
    """Show a progress bar in bytes; in a log one line at the end."""
    bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, smoothing=0.05, disable=None if shown else True)
    begin = time.monotonic()
    with logging_redirect_tqdm(), bar:
        yield bar
    if shown and bar.disable:
        size = tqdm.format_sizeof(total, "B")
        print(f"{what}: {size} in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def write_behind(path: Path) -> None:
    """Start writing a file's new pages to the disk, and drop the clean ones."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Sync everything in a folder."""
    found = sorted(folder.rglob("*"))
    in_parallel(sync, [path for path in found if path.is_file()])
    in_parallel(sync, [folder, *(path for path in found if path.is_dir())])

"""Find and tokenize the windows of a streamed set on demand.

An epoch's files stand in an order of its own, and their records are tokenized in that order by the same machinery as
any set (`data.tokenized`). A window ends with the chunk of records by which its samples reach a number of bytes, or
with the epoch. So where it begins is known when the one before it was made. That is kept (`Windows.made`), and whoever
has kept it finds any window without making those before. To get to a window's first record its file is read from the
beginning, but not tokenized; files that are larger than a window make that slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy
from rich.console import Console

from data.errors import DataError
from data.tokenized.dataset import Dataset
from data.tokenized.meta import read_meta
from data.tokenized.recipe import Recipe, Window, stamp
from data.tokenized.store import Cache, open_cache

POLL = 1.0  # seconds between two looks at a window that is being made


class WindowStart(NamedTuple):
    """Locate where a window begins: a file in an epoch's order, and the records of it that come before."""

    epoch: int
    file: int
    skip: int


class MadeWindow(NamedTuple):
    """Hold what is kept of a window."""

    samples: int
    end: WindowStart  # where the next one begins
    fingerprint: str  # of its tokens and labels


class Windows:
    """Manage the windows of all epochs, counted from 0.

    Args:
        recipe: of all records.
        n_bytes: of a window's samples.
        folder: for the samples of this run and no other.
        log: gets a line that says whom this process waits for.

    Raises:
        DataError: a file is missing.
    """

    def __init__(self, recipe: Recipe, n_bytes: int, seed: int, folder: Path, log: Console) -> None:
        self.made: list[MadeWindow] = []  # those that were made so far
        self.sizes = {file.path: stamp(Path(file.path))[0] for file in recipe.files}  # in bytes, by path
        self.n_bytes = n_bytes
        self.settings = recipe.settings_digest([self.sizes[file.path] for file in recipe.files])
        self._recipe = recipe
        self._seed = seed
        self._folder = folder
        self._log = log
        self._ahead: dict[int, Future[Path]] = {}

    def begin(self, number: int) -> WindowStart:
        """Return where a window begins; the one before it must be made."""
        return self.made[number - 1].end if number else WindowStart(0, 0, 0)

    def open(self, number: int, waiting: Callable[[], object]) -> Dataset:
        """Open the samples of a window (maybe none); the one before it must be made.

        Args:
            waiting: called every second until they are there.

        Raises:
            DataError: a file or a record is wrong, a file has changed, or a whole epoch gives no sample.
        """
        begin, recipe = self.begin(number), self._recipe_of(number)
        job = self._ahead.pop(number, None)
        if job is not None and not job.done():
            self._log.print(f"data: the run waits for window {number + 1}: tokenizing is slower than training")
        job = job or _begun(lambda: open_cache(recipe, self._folder, self._log))
        while not job.done():
            waiting()
            wait([job], POLL)
        folder = job.result()
        dataset = Dataset(folder, [file.path for file in recipe.files])
        file, skip = read_meta(folder)["end"]
        for path in {each.path for each in recipe.files[begin.file : file + 1]}:
            if stamp(Path(path))[0] != self.sizes[path]:
                raise DataError(f"{path}: has changed since this run began; expected {self.sizes[path]} bytes")
        over = file == len(recipe.files)
        end = WindowStart(begin.epoch + 1, 0, 0) if over else WindowStart(begin.epoch, file, skip)
        made = MadeWindow(len(dataset), end, dataset.fingerprint())
        left_out = f"; {dataset.n_bad:,} left out as bad; {dataset.skipped[0]}" if dataset.n_bad else ""
        self._log.print(f"data: window {number + 1}, in epoch {begin.epoch + 1}: {len(dataset):,} samples{left_out}")
        if number < len(self.made):
            if made != self.made[number]:
                raise DataError(
                    f"{recipe.files[begin.file].path}: it or a file near it gives other samples than when the run was "
                    "first here; expected the same records, or another save_path"
                )
            return dataset
        self.made.append(made)
        of_epoch = (made for number, made in enumerate(self.made) if self.begin(number).epoch == begin.epoch)
        if over and not any(each.samples for each in of_epoch):
            limit = recipe.max_seq_len
            raise DataError(f"{recipe.names}: no token is trained within max_seq_len {limit}; expected a larger limit")
        return dataset

    def make(self, number: int) -> None:
        """Start making a window in the background (its predecessor is made); `open` waits for it."""
        if number not in self._ahead:
            recipe, quiet = self._recipe_of(number), Console(quiet=True)
            self._ahead[number] = _begun(lambda: open_cache(recipe, self._folder, quiet, progress=False))

    def keep(self, numbers: Collection[int]) -> None:
        """Remove the samples of all windows but these."""
        Cache(self._folder).keep([self._recipe_of(number) for number in numbers])

    def peek(self) -> Dataset:
        """Return samples of the first records, which are no window."""
        recipe = self._recipe_of(0, n_bytes=1)
        return Dataset(open_cache(recipe, self._folder, self._log), [file.path for file in recipe.files])

    def _recipe_of(self, number: int, n_bytes: int | None = None) -> Recipe:
        place = self.begin(number)
        order = numpy.random.Generator(numpy.random.PCG64([self._seed, place.epoch]))
        files = tuple(self._recipe.files[file] for file in order.permutation(len(self._recipe.files)))
        return replace(
            self._recipe, files=files, window=Window(place.file, place.skip, n_bytes or self.n_bytes, self.settings)
        )


def _begun(work: Callable[[], Path]) -> Future[Path]:
    """Run a function in the background; it is abandoned when the process ends."""
    job: Future[Path] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as failure:  # whoever asks for the result gets it
            job.set_exception(failure)

    Thread(target=run, name="window", daemon=True).start()
    return job

"""Tokenize a data set while a run trains on it, because all of it would not fit on the disk.

Windows (`windows.py`) follow each other without a gap, over the ends of epochs too, and the samples of each
are shuffled. A position in the stream is the number of samples before it; which sample stands there is a pure function
of the seed, the position and the bytes that the stream may have. A window takes half of these: one is trained on while
the next is made, and what was trained on is removed.

Cost: none where the next window is there in time. A start waits for its first window.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from rich.console import Console

from data.chat.prompts import PromptFormat, Prompts, as_prompts
from data.errors import DataError
from data.loader import GlobalBatch, Loader
from data.records.sources import as_sources, files_of
from data.settings import OnBadRecord, Source, Truncate, Wanted
from data.tokenized.dataset import Dataset
from data.tokenized.recipe import DataFile, Recipe
from options.streamed_data.windows import MadeWindow, Windows, WindowStart

SHARE = 0.5  # of the stream's bytes that a window takes


@dataclass
class _Held:
    """Hold a readable window; its samples have the numbers from `first` on, and `order` shuffles them."""

    first: int
    dataset: Dataset
    order: NDArray[numpy.int64]


class Stream:
    """Read samples by number, from the windows of the last two calls of `take`."""

    def __init__(self, windows: Windows, seed: int) -> None:
        self.windows = windows  # where each begins, and what was made of them
        self.waiting: Callable[[], object] = lambda: None  # called every second while a window is waited for
        # The position where the run ends, in one process of each host: this one makes windows before they are needed,
        # and removes old ones. 0 in the others.
        self.until = 0
        # What a `data.sample_set.SampleSet` has.
        self.samples: Any = _Column(self, "samples")
        self.lengths: Any = _Column(self, "lengths")
        self.supervised: Any = _Column(self, "supervised")
        self.first: Any = _Column(self, "first")
        self.first_supervised: Any = _Column(self, "first_supervised")
        self.values: Any = _Column(self, "values")
        self.image_tokens: Any = _Column(self, "image_tokens")
        self.has_images = False  # `data.tokenized.image_reader` refuses records with images
        self._seed = seed
        self._ends: list[int] = []  # [windows that were made], samples up to the end of each
        self._held: dict[int, _Held] = {}
        self._kept: set[int] | None = None  # windows that may be on the disk; at first anything

    def resume(self, made: Sequence[tuple[int, Sequence[int], str]]) -> None:
        """Take over what a checkpoint knows of the windows (`MadeWindow`)."""
        self.windows.made[:] = [
            MadeWindow(samples, WindowStart(*end), fingerprint) for samples, end, fingerprint in made
        ]
        self._ends = numpy.cumsum([each.samples for each in self.windows.made], dtype=numpy.int64).tolist()

    def __len__(self) -> int:
        """Count the samples made so far."""
        return self._ends[-1] if self._ends else 0

    def take(self, begin: int, count: int) -> list[int]:
        """Return the numbers of the samples at some positions.

        Raises:
            DataError: a file or a record is wrong, a file has changed, or a whole epoch gives no sample.
        """
        end = begin + count
        while len(self) < end:
            self._open(len(self._ends))
            self._let_go(begin - count)
        between = range(bisect_right(self._ends, begin), bisect_left(self._ends, end) + 1)
        needed = [number for number in between if self.windows.made[number].samples]
        for number in needed:
            self._open(number)
        self._let_go(begin - count)
        self._tidy(needed[-1] + 1)
        chosen: list[int] = []
        for held in (self._held[number] for number in needed):
            part = slice(max(begin - held.first, 0), max(end - held.first, 0))
            chosen += (held.first + held.order[part]).tolist()
        return chosen

    def close(self) -> None:
        """Remove all samples: the run is done."""
        self._held.clear()
        self._keep(set())

    @property
    def first_window(self) -> Dataset | None:
        """Return the first of the windows that are held."""
        return self._held[min(self._held)].dataset if self._held else None

    def epoch(self, position: int) -> int:
        """Return the epoch (from 0) of the sample at a position that was taken."""
        return self.windows.begin(bisect_right(self._ends, position)).epoch

    def origin(self, number: int) -> str:
        """Name a sample's source file and record."""
        dataset, place = self.find(number)
        return dataset.origin(place)

    def fingerprint(self) -> str:
        """Digest the files' sizes, the tokenizer, the prompts and the limit.

        The tokens are not in it; those of a window are compared where it is made once more.
        """
        return self.windows.settings

    def find(self, number: int) -> tuple[Dataset, int]:
        """Find the window that holds a sample, and the sample's place there."""
        held = self._held[bisect_right(self._ends, number)]
        return held.dataset, number - held.first

    def _open(self, number: int) -> None:
        if number in self._held:
            return
        known = range(number, min(number + 2, len(self._ends) + 1))  # an earlier start may have made the one after it
        self._keep({*self._held, *known})
        dataset = self.windows.open(number, self.waiting)
        if number == len(self._ends):
            self._ends.append(len(self) + len(dataset))
        generator = numpy.random.Generator(numpy.random.PCG64([self._seed, self.windows.begin(number).epoch, number]))
        first = self._ends[number] - len(dataset)
        if len(dataset):
            self._held[number] = _Held(first, dataset, generator.permutation(len(dataset)))

    def _let_go(self, position: int) -> None:
        """Release windows that end before a position."""
        for number in [number for number in self._held if self._ends[number] <= position]:
            del self._held[number]

    def _tidy(self, following: int) -> None:
        """Remove what is no longer needed, and make the next window as soon as there is room for it."""
        ahead = len(self._held) == 1 and self._ends[following - 1] < self.until
        self._keep({*self._held, following} if ahead else set(self._held))
        if ahead:
            self.windows.make(following)

    def _keep(self, numbers: set[int]) -> None:
        if self.until and numbers != self._kept:
            self.windows.keep(numbers)
            self._kept = numbers


class _Column:
    """Look up a value of each sample in its window, by the sample's number."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, numbers: Any) -> Any:
        if isinstance(numbers, int):
            return self._at(numbers)
        return numpy.array([self._at(number) for number in numbers], dtype=numpy.int32)

    def _at(self, number: int) -> Any:
        dataset, place = self._stream.find(number)
        return getattr(dataset, self._name)[place]


class StreamLoader(Loader):
    """Cut an endless stream into global batches, all of them full.

    How many an epoch has is not known. A batch's tensors can be made until the one after the next is cut.
    """

    data: Stream
    knows_lengths = False

    def batch(self, step: int) -> GlobalBatch:
        """Return the global batch of a step, counted from 0."""
        return self.batch_of(self.data.take(step * self.batch_size, self.batch_size))

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) in which a step that was cut begins."""
        return self.data.epoch(step * self.batch_size)

    def _count_steps(self, drop_last: bool) -> int:
        return 0


def open_stream(
    data_path: str | Path | Source | Sequence[str | Path | Source],
    tokenizer: str | Path,
    max_seq_len: int,
    prompt_format: Prompts | PromptFormat,
    *,
    gigabytes: float,
    folder: Path,
    on_bad_record: OnBadRecord = "stop",
    truncate: Truncate = "turns",
    preference: Wanted | None = None,
    seed: int = 0,
    log: Console | None = None,
) -> Stream:
    """Open a stream of records; nothing is tokenized yet. See `data.tokenized.loading.load_dataset`.

    Args:
        gigabytes: that samples may take on the disk at any time.
        folder: for them, of this run and no other.

    Raises:
        DataError: a file is missing, or a source asks for a part of its records.
    """
    log = log or Console(quiet=True)
    files = []
    for source in as_sources(data_path):
        if source.weight is not None or source.repeat % 1:
            raise DataError(
                f"data_path: {source.path}: weights and broken repeats need the number of records, which a stream does "
                "not know; expected a whole repeat, or no stream_gb"
            )
        found = files_of(source, log.print)
        files += [DataFile(str(file), source.format, source.columns) for file in found] * int(source.repeat)
    recipe = Recipe(
        tuple(files), str(tokenizer), as_prompts(prompt_format), max_seq_len, on_bad_record, truncate, preference
    )
    windows = Windows(recipe, int(gigabytes * 1e9 * SHARE), seed, folder, log)
    sizes = windows.sizes.values()
    log.print(
        f"data: {len(sizes):,} files of {sum(sizes) / 1e9:,.2f} GB, tokenized while training: at most {gigabytes:g} GB "
        f"at a time, in {folder}"
    )
    if max(sizes) > windows.n_bytes:
        log.print(
            f"warning: the largest file, of {max(sizes) / 1e9:,.2f} GB, gives several windows of stream_gb, and is "
            "read from its beginning for each: smaller files are faster, and shuffled better"
        )
    return Stream(windows, seed)

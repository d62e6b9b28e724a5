"""Write tokenized samples to Arrow batch by batch; read them as memory-mapped arrays.

Nothing is loaded: a sample's ids are a view of the file in the system's page cache, which all processes of a host
share. Its labels are made when it is asked for, from the trained runs (see `data.tokenized.columns`).

Every part of a batch has a checksum, which is compared when the part is first used. So opening reads next to nothing,
however large the file is, and no token is trained on that was not written.

Cost: 4 bytes a token on the disk; for the checksums a second for each 1 to 3 GB, in each process that reads them.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy
import pyarrow
from numpy.typing import NDArray

from common.whole_files import regular
from data.errors import DataError
from data.sample_set import IGNORED, Sample
from data.tokenized.columns import SCHEMA

# What checksums are taken of: whole columns, and of lists their entries and where these begin.
PARTS = "input_ids.values input_ids.offsets runs.values runs.offsets supervised kind file record digest".split()
CHECKSUMS = "crc32"
DAMAGED = "damaged"  # a file beside the samples once a checksum was wrong


def _part(batch: pyarrow.RecordBatch, name: str) -> NDArray[Any]:
    column, _, piece = name.partition(".")
    found = batch.column(column)
    array: NDArray[Any] = (getattr(found, piece) if piece else found).to_numpy()
    return array


class SampleWriter:
    """Write batches into a new file, on the disk when the block ends."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")
        self._writer = pyarrow.ipc.new_file(self._file, SCHEMA)

    @property
    def size(self) -> int:
        """Return the bytes written so far."""
        return self._file.tell()

    def write(self, batch: pyarrow.RecordBatch) -> None:
        """Add samples."""
        checksums = " ".join(str(zlib.crc32(_part(batch, name).data)) for name in PARTS)
        self._writer.write_batch(batch, custom_metadata={CHECKSUMS: checksums})

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        with self._file:
            if failure[0] is None:
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())


class SampleFile(Sequence[Sample]):
    """Read the samples of a file, or some of them in any order.

    Indexing gives `input_ids` and `labels` as int32 arrays of the same length; `input_ids` cannot be written to. A
    process that gets this object by fork or pickle maps the file anew where it has to.

    Args:
        path: what a `SampleWriter` wrote.
        numbers: which samples, in this order; a sample may stand there several times. All of them where absent.

    Raises:
        ValueError: the file is no Arrow file, or a part of one.
        OSError: the file cannot be read.
        DataError: from all but `len`: what is asked for is damaged.
    """

    def __init__(self, path: Path, numbers: NDArray[numpy.int64] | None = None) -> None:
        self._path = path
        self._numbers = numbers
        with open(path, "rb", opener=regular):
            file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        found = [file.get_batch_with_custom_metadata(number) for number in range(file.num_record_batches)]
        self._batches = [each.batch for each in found]
        self._checksums = [list(map(int, each.custom_metadata[CHECKSUMS].split())) for each in found]
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]
        self._mapped: dict[int, list[NDArray[numpy.int32]]] = {}  # the first four PARTS of batches

    def __len__(self) -> int:
        return self._starts[-1] if self._numbers is None else len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Sample]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return self.select(numpy.arange(len(self))[number])
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        place = number % len(self) if self._numbers is None else int(self._numbers[number])
        batch_number = bisect_right(self._starts, place) - 1
        all_ids, offsets, runs, run_offsets = self._mapped.get(batch_number) or self._map(batch_number)
        row = place - self._starts[batch_number]
        ids = all_ids[offsets[row] : offsets[row + 1]]
        labels = numpy.full(len(ids), IGNORED, dtype=numpy.int32)
        borders = runs[run_offsets[row] : run_offsets[row + 1]].tolist()
        for begin, end in zip(borders[::2], borders[1::2], strict=True):
            labels[begin:end] = ids[begin:end]
        sample: Any = {"input_ids": ids, "labels": labels}  # arrays where a Sample has lists
        return sample

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleFile, (self._path, self._numbers)

    def select(self, numbers: NDArray[numpy.int64]) -> SampleFile:
        """Select samples, in the order of `numbers`."""
        return SampleFile(self._path, numbers if self._numbers is None else self._numbers[numbers])

    @cached_property
    def lengths(self) -> NDArray[numpy.int32]:
        """Return [n], tokens of each sample."""
        return self._chosen([numpy.diff(offsets) for offsets in self._parts("input_ids.offsets")])

    def largest_id(self) -> int:
        """Find the largest token id of the file; reads all of it."""
        return max((int(ids.max(initial=0)) for ids in self._parts("input_ids.values")), default=0)

    def column(self, name: str) -> NDArray[Any]:
        """Return [n], one of the schema's columns of numbers."""
        return self._chosen(list(self._parts(name)))

    def _chosen(self, parts: list[NDArray[Any]]) -> NDArray[Any]:
        values = numpy.concatenate(parts) if parts else numpy.empty(0, dtype=numpy.int32)
        return values if self._numbers is None else values[self._numbers]

    def _parts(self, name: str) -> Iterator[NDArray[Any]]:
        return (self._checked(number, name) for number in range(len(self._batches)))

    def _map(self, number: int) -> list[NDArray[numpy.int32]]:
        self._mapped[number] = [self._checked(number, name) for name in PARTS[:4]]
        return self._mapped[number]

    def _checked(self, number: int, name: str) -> NDArray[Any]:
        """Return a part of a batch after checking its checksum."""
        part = _part(self._batches[number], name)
        if zlib.crc32(part.data) != self._checksums[number][PARTS.index(name)]:
            folder = self._path.parent
            with suppress(OSError):
                (folder / DAMAGED).touch()
            raise DataError(f"{folder}: these tokenized records are damaged; started again, a run tokenizes them anew")
        return part

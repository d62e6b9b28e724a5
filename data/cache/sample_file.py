"""Tokenized samples in an Arrow file: written batch by batch, read as memory-mapped arrays.

Nothing is loaded: a sample's ids are a view of the file in the system's page cache, which all processes of a host
share. Its labels are made when it is asked for, from the runs that bear loss (see `data.cache.columns`). A token takes
4 bytes on the disk.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from data.cache.columns import Columns
from data.tokenize import IGNORED, Sample

SCHEMA = pyarrow.schema(
    [
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("runs", pyarrow.list_(pyarrow.int32())),
        ("supervised", pyarrow.int32()),
        ("kind", pyarrow.int8()),
        ("file", pyarrow.int32()),
        ("record", pyarrow.int64()),
        ("digest", pyarrow.uint64()),
    ]
)


class SampleWriter:
    """Writes columns into a new file, on the disk when the block ends.

    Attributes:
        kinds: the types of record that were written; the file names them by their places here.
    """

    def __init__(self, path: Path) -> None:
        self.kinds: list[str] = []
        self._file = open(path, "wb")
        self._writer = pyarrow.ipc.new_file(self._file, SCHEMA)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, columns: Columns) -> None:
        """Add samples."""
        self.kinds += [name for name in columns.names if name not in self.kinds]
        places = numpy.array([self.kinds.index(name) for name in columns.names], dtype=numpy.int8)
        arrays = [
            pyarrow.ListArray.from_arrays(columns.offsets, columns.ids),
            pyarrow.ListArray.from_arrays(columns.run_offsets, columns.runs),
            columns.supervised,
            places[columns.kinds],
            columns.files,
            columns.records,
            columns.digests,
        ]
        self._writer.write_batch(pyarrow.record_batch(arrays, schema=SCHEMA))

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        with self._file:
            if failure[0] is None:
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())


class _Batch(NamedTuple):
    ids: NDArray[numpy.int32]
    offsets: NDArray[numpy.int32]
    runs: NDArray[numpy.int32]
    run_offsets: NDArray[numpy.int32]


class SampleFile(Sequence[Sample]):
    """The samples of a file, or some of them in any order.

    Indexing gives `input_ids` and `labels` as int32 arrays of the same length; `input_ids` cannot be written to. A
    process that gets this object by fork or pickle maps the file anew where it has to.

    Args:
        path: what a `SampleWriter` wrote.
        numbers: which samples, in this order; a sample may stand there several times. All of them where absent.

    Raises:
        ValueError: the file is no Arrow file, or a part of one.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, numbers: NDArray[numpy.int64] | None = None) -> None:
        self._path = path
        self._numbers = numbers
        self._table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        chunks = self._table.column("input_ids").chunks
        self._starts = [0, *accumulate(len(chunk) for chunk in chunks)]
        self._batches: dict[int, _Batch] = {}

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
        batch = self._batches.get(batch_number) or self._map(batch_number)
        row = place - self._starts[batch_number]
        ids = batch.ids[batch.offsets[row] : batch.offsets[row + 1]]
        labels = numpy.full(len(ids), IGNORED, dtype=numpy.int32)
        borders = batch.runs[batch.run_offsets[row] : batch.run_offsets[row + 1]].tolist()
        for begin, end in zip(borders[::2], borders[1::2], strict=True):
            labels[begin:end] = ids[begin:end]
        sample: Any = {"input_ids": ids, "labels": labels}  # arrays where a Sample has lists
        return sample

    def __iter__(self) -> Iterator[Sample]:
        return (self[number] for number in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleFile, (self._path, self._numbers)

    def select(self, numbers: NDArray[numpy.int64]) -> SampleFile:
        """Some of these samples, in the order of `numbers`."""
        return SampleFile(self._path, numbers if self._numbers is None else self._numbers[numbers])

    @cached_property
    def lengths(self) -> NDArray[numpy.int32]:
        """[n], tokens of each sample."""
        return self._chosen(pyarrow.compute.list_value_length(self._table.column("input_ids")))

    def largest_id(self) -> int:
        """The largest token id of the file; reads all of it."""
        chunks = self._table.column("input_ids").chunks
        return max((int(pyarrow.compute.max(chunk.values).as_py() or 0) for chunk in chunks), default=0)

    def column(self, name: str) -> NDArray[Any]:
        """[n], one of the schema's columns of numbers."""
        return self._chosen(self._table.column(name))

    def _chosen(self, column: pyarrow.ChunkedArray) -> NDArray[Any]:
        values: NDArray[Any] = column.to_numpy()
        return values if self._numbers is None else values[self._numbers]

    def _map(self, number: int) -> _Batch:
        columns = (self._table.column(name).chunk(number) for name in ("input_ids", "runs"))
        made = _Batch(*(part.to_numpy() for column in columns for part in (column.values, column.offsets)))
        self._batches[number] = made
        return made

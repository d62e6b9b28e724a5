"""Keep tokenized samples in two files that are mapped into memory, and check what is read from them.

    samples.bin     int32 numbers: each sample's token ids, then its runs (where trained stretches begin and end)
    index.bin       a row of `INDEX` for each sample, in the order of the records

Samples with images have more beside these (`data.images.beside_samples`).

A sample's labels are its own token ids or IGNORED, so the runs say as much as a second list of ids and take next to no
room. Nothing is loaded: a sample's ids are a view of the file in the system's page cache, which all processes of a host
share.

The index is checked as a whole when a set is opened (`data.tokenized.store`), and each sample by its digest whenever it
is read. So no token is trained on that was not written.

Cost: 4 bytes a token and 53 a sample on the disk; a second at opening for each 20 million samples.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from struct import pack
from typing import Any, overload

import numpy
from numpy.typing import NDArray

from common.whole_files import regular
from data.errors import DataError
from data.images.beside_samples import ImageFile, ImageWriter, digested
from data.images.image import Image
from data.sample_set import IGNORED, Sample

SAMPLES, INDEX_FILE = "samples.bin", "index.bin"
DAMAGED = "damaged"  # a file beside the samples once one of them was
INDEX = numpy.dtype(
    [
        ("begin", "<i8"),  # where its ids begin in samples.bin, in numbers
        ("length", "<i4"),  # tokens
        ("borders", "<i4"),  # numbers of its runs, two each, counted from the sample's first token
        ("supervised", "<i4"),  # trained tokens
        ("kind", "<i1"),  # of the record, as a place in TYPES
        ("file", "<i4"),  # that the record is from
        ("record", "<i8"),  # its number in that file, from 1
        ("first", "<i4"),  # tokens of the first of two documents, 0 where there is one
        ("first_supervised", "<i4"),  # trained tokens of it
        ("value", "<f4"),  # see `data.sample_set.Preference`
        ("digest", "<u8"),  # of the rest: among a hundred million, two are alike by accident once in 4,000 sets
    ]
)


def sample_digest(numbers: Any, first: int, value: float, images: Sequence[Image] = ()) -> int:
    """Digest the bytes of a sample's ids and runs, and what else it is trained by."""
    digest = blake2b(numbers, digest_size=8)
    if first:
        digest.update(pack("<i", first))
    if images:
        digest.update(digested(images))
    return int.from_bytes(digest.digest(), "little") ^ _value_digest(value)


@cache
def _value_digest(value: float) -> int:
    """Digest a value by itself, so that it can be taken out of a sample's digest again."""
    return int.from_bytes(blake2b(pack("<f", value), digest_size=8).digest(), "little") if value else 0


class SampleWriter:
    """Write batches of samples into an empty folder; they are on the disk when the block ends."""

    def __init__(self, folder: Path) -> None:
        self._samples, self._index = open(folder / SAMPLES, "wb"), open(folder / INDEX_FILE, "wb")
        self._images = ImageWriter(folder)

    @property
    def size(self) -> int:
        """Return the bytes written so far."""
        return self._samples.tell() + self._index.tell() + self._images.size

    def write(self, numbers: bytes, index: NDArray[Any], pictured: Sequence[tuple[int, Sequence[Image]]] = ()) -> None:
        """Add samples, whose places are counted from the first of `numbers`, and rows from that of `index`."""
        for row, images in pictured:
            self._images.write(self._index.tell() // INDEX.itemsize + row, images)
        index["begin"] += self._samples.tell() // numpy.dtype(numpy.int32).itemsize
        self._samples.write(numbers)
        self._index.write(index.tobytes())

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        for file in (self._samples, self._index):
            with file:
                file.flush()
                os.fsync(file.fileno())
        self._images.close()


class SampleFile(Sequence[Sample]):
    """Read the samples of a folder, or some of them in any order.

    Indexing gives `input_ids` and `labels` as int32 arrays of the same length; `input_ids` cannot be written to. There
    are `first` and `value` where they are not 0, and `images` where there is one. A process that gets this object by
    pickle maps the files anew.

    Args:
        folder: what a `SampleWriter` wrote to.
        numbers: which samples, in this order; a sample may stand there several times. All of them where absent.
        files: that the records are from, by which images are found; of no use without images.

    Raises:
        ValueError: a file is part of one.
        OSError: a file cannot be read.
        DataError: from indexing: the sample is damaged.
    """

    def __init__(self, folder: Path, numbers: NDArray[numpy.int64] | None = None, files: Sequence[str] = ()) -> None:
        self._folder = folder
        self._numbers = numbers
        self._files = files
        self._images = ImageFile(folder)
        self._data = _mapped(folder / SAMPLES, numpy.dtype("<i4"))
        self._index = _mapped(folder / INDEX_FILE, INDEX)

    def __len__(self) -> int:
        return len(self._index) if self._numbers is None else len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Sample]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[place] for place in range(len(self))[number]]
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        place = number % len(self) if self._numbers is None else int(self._numbers[number])
        begin, length, borders, _, _, file, _, first, _, value, digest = self._index[place].item()
        numbers, images = self._data[begin : begin + length + borders], self._images.of(place)
        if sample_digest(numbers, first, value, images) != digest:
            self.distrust()
            raise DataError(
                f"{self._folder}: these tokenized records are damaged; started again, a run tokenizes them anew"
            )

        ids = numbers[:length]
        labels = numpy.full(length, IGNORED, dtype=numpy.int32)
        runs = numbers[length:].tolist()
        for start, end in zip(runs[::2], runs[1::2], strict=True):
            labels[start:end] = ids[start:end]
        sample: Any = {"input_ids": ids, "labels": labels}  # arrays where a Sample has lists
        found = self._images.found(images, self._files[file]) if images else []
        return sample | {
            name: known for name, known in (("first", first), ("value", value), ("images", found)) if known
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleFile, (self._folder, self._numbers, self._files)

    def column(self, name: str) -> NDArray[Any]:
        """Return [n], a column of the index."""
        column = numpy.ascontiguousarray(self._index[name])
        return column if self._numbers is None else column[self._numbers]

    def distrust(self) -> None:
        """Have the next start tokenize anew, as something is not what is noted here."""
        with suppress(OSError):
            (self._folder / DAMAGED).touch()

    def is_whole(self, checksum: Sequence[int]) -> bool:
        """Say whether the index is the one with this checksum, and images that lay in records are still there."""
        return self.checksum() == checksum and self._images.kept_are_there()

    def image_tokens(self) -> NDArray[numpy.int32]:
        """Return [n], the tokens that features of images take, or 0."""
        counts = self._images.tokens(len(self._index))
        return counts if self._numbers is None else counts[self._numbers]

    def contradictions(self) -> NDArray[numpy.int64]:
        """Find the samples that are the same as an earlier one but for their values; of equal ones the first."""
        digests = self.column("digest")
        values, which = numpy.unique(self.column("value"), return_inverse=True)
        bare = digests ^ numpy.array([_value_digest(value) for value in values.tolist()], numpy.uint64)[which]
        first = numpy.sort(numpy.unique(digests, return_index=True)[1])
        return numpy.delete(first, numpy.unique(bare[first], return_index=True)[1])

    def checksum(self) -> list[int]:
        """Return what tells this index, and the size of all samples, from others."""
        return [zlib.crc32(self._index.view(numpy.uint8).data), len(self._data), *self._images.checksum()]


def _mapped(path: Path, dtype: numpy.dtype[Any]) -> NDArray[Any]:
    """Map a file into memory, as a plain array: a memmap's slices take ten times as long."""
    with open(path, "rb", opener=regular) as file:
        if not os.fstat(file.fileno()).st_size:
            return numpy.empty(0, dtype)
        return numpy.asarray(numpy.memmap(file, dtype, "r"))

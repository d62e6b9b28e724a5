"""Keep the images of tokenized samples in two files beside these; a set without images has neither.

    images.bin          for each sample with images a list of them, as JSON
    image_index.bin     a row of `ROWS` for each of these samples, in their order

A path is kept as the record has it, so that it holds wherever the data lie, from the folder of the record's file. An
image that lay in the record itself is a file of the cache (`KEPT`), which is told by what no path holds.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from common.whole_files import regular
from data.images.image import Image

IMAGES, INDEX_FILE = "images.bin", "image_index.bin"
KEPT = "images"  # the folder of the cache with images that were no files
OF_CACHE = "\0"  # what the path of one of these begins with
ROWS = numpy.dtype([("sample", "<i8"), ("begin", "<i8"), ("size", "<i4"), ("tokens", "<i4"), ("kept", "<i4")])


def digested(images: Sequence[Image]) -> bytes:
    """Return what tells a sample's images from others, wherever their files lie."""
    return json.dumps([image[1:] for image in images]).encode()


class ImageWriter:
    """Write images of samples into a folder; the files are made for the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[BinaryIO] = []

    @property
    def size(self) -> int:
        """Return the bytes written so far."""
        return sum(file.tell() for file in self._files)

    def write(self, sample: int, images: Sequence[Image]) -> None:
        """Add the images of a sample, which is none before the last one."""
        if not self._files:
            self._files = [open(self._folder / name, "wb") for name in (IMAGES, INDEX_FILE)]
        content, index = self._files
        written = json.dumps(images).encode()
        kept = [image for image in images if image.path.startswith(OF_CACHE)]
        row = sample, content.tell(), len(written), sum(image.tokens for image in images), len(kept)
        content.write(written)
        index.write(numpy.array([row], ROWS).tobytes())

    def close(self) -> None:
        """Bring all to the disk."""
        for file in self._files:
            with file:
                file.flush()
                os.fsync(file.fileno())


class ImageFile:
    """Read the images of samples.

    Args:
        folder: what an `ImageWriter` wrote to, in the folder of sets of a cache.
    """

    def __init__(self, folder: Path) -> None:
        self._cache = folder.parent.parent
        self._content: NDArray[numpy.uint8] = numpy.empty(0, numpy.uint8)
        self._index = numpy.empty(0, ROWS)
        if (folder / INDEX_FILE).exists():
            with open(folder / INDEX_FILE, "rb", opener=regular) as file:
                self._index = numpy.frombuffer(file.read(), ROWS)
            self._content = numpy.memmap(folder / IMAGES, numpy.uint8, "r")
        self._samples = numpy.ascontiguousarray(self._index["sample"])

    def of(self, sample: int) -> list[Image]:
        """Return a sample's images, with paths as they are kept; mostly none."""
        row = int(self._samples.searchsorted(sample))
        if row == len(self._samples) or self._samples[row] != sample:
            return []
        _, begin, size, *_ = self._index[row].item()
        return [Image(*each) for each in json.loads(bytes(self._content[begin : begin + size]))]

    def found(self, images: Sequence[Image], file: str) -> list[Image]:
        """Return images with the paths of their files.

        Args:
            file: that the sample's record is from.
        """
        return [image._replace(path=self._path(image.path, Path(file).parent)) for image in images]

    def _path(self, kept: str, folder: Path) -> str:
        if kept.startswith(OF_CACHE):
            return str(self._cache.absolute() / KEPT / kept.removeprefix(OF_CACHE))
        return os.path.abspath(folder / kept)

    def tokens(self, n_samples: int) -> NDArray[numpy.int32]:
        """Return [n_samples], the tokens that a sample's images take."""
        counts = numpy.zeros(n_samples, numpy.int32)
        counts[self._samples] = self._index["tokens"]
        return counts

    def kept_are_there(self) -> bool:
        """Say whether the first image is there that is a file of the cache, or there is none."""
        rows = numpy.flatnonzero(self._index["kept"])
        images = self.of(int(self._samples[rows[0]])) if len(rows) else []
        return all(os.path.exists(self._path(each.path, Path())) for each in images if each.path.startswith(OF_CACHE))

    def checksum(self) -> list[Any]:
        """Return what tells this index, and the size of all lists, from others; nothing without images."""
        return [zlib.crc32(self._index.tobytes()), len(self._content)] if len(self._index) else []

"""Hold a run's tokenized records, with the counts of what happened to them.

Every sample is tokenized once (`data.tokenized.loading`), before the first run that needs it; here it is only looked
at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.records.record import TYPES, origin
from data.tokenized.meta import Tally, read_meta
from data.tokenized.sample_file import SampleFile


class Dataset:
    """Hold samples ready to be batched, in the order of their records.

    Args:
        folder: of the cache.
        files: that the records are from.
        numbers: which of the cache's samples, and in what order; all of them where absent.
    """

    def __init__(self, folder: Path, files: Sequence[str], numbers: NDArray[numpy.int64] | None = None) -> None:
        meta = read_meta(folder)
        self.samples = SampleFile(folder, numbers, files)  # `input_ids` and `labels` of each, as int32 arrays
        self.files = list(files)
        self.folder = folder
        self.tallies: dict[tuple[str, str], Tally] = {}  # what became of the records, by file and type of record
        for file, kind, counts in meta["tallies"]:
            group = self.files[file], kind
            self.tallies[group] = self.tallies.get(group, Tally()) + Tally(**counts)
        self.n_bad = int(meta["n_bad"])  # how many records were left out because something is wrong with them
        self.skipped: list[str] = meta["skipped"]  # a line for each of the first of these, and their count
        self.unused: dict[str, int] = meta["unused"]  # how many records have which unused fields, most frequent first
        # Notes to report on how records were written, of how many, and an example of each.
        self.notes: list[tuple[str, int, str]] = meta["notes"]
        self.duplicates: int = meta["duplicates"]  # how many of the cache's samples equal an earlier one
        self._fingerprint: str = meta["fingerprint"]
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def lengths(self) -> NDArray[numpy.int32]:
        """Return [n], tokens of each sample."""
        return self.samples.column("length")

    @cached_property
    def supervised(self) -> NDArray[numpy.int32]:
        """Return [n], trained tokens of each sample; the first has no predecessor to predict it."""
        return self.samples.column("supervised")

    @cached_property
    def first(self) -> NDArray[numpy.int32]:
        """Return [n], tokens of the first of a sample's two documents, 0 where there is one."""
        return self.samples.column("first")

    @cached_property
    def first_supervised(self) -> NDArray[numpy.int32]:
        """Return [n], trained tokens of that document."""
        return self.samples.column("first_supervised")

    @cached_property
    def values(self) -> NDArray[numpy.float32]:
        """Return [n], the number that belongs to each sample: a pair's margin, a mark, a class or a score."""
        return self.samples.column("value")

    @cached_property
    def image_tokens(self) -> NDArray[numpy.int32]:
        """Return [n], the tokens of each sample that features of images take."""
        return self.samples.image_tokens()

    @property
    def has_images(self) -> bool:
        """Say whether any sample has an image."""
        return bool(self.image_tokens.any())

    @cached_property
    def types(self) -> list[str]:
        """List the types of records, sorted."""
        return sorted(TYPES[kind] for kind in numpy.unique(self._kinds))

    def of_type(self, name: str) -> NDArray[numpy.bool_]:
        """Return [n], whether each sample's record is of a type."""
        return self._kinds == TYPES.index(name)

    @cached_property
    def _kinds(self) -> NDArray[Any]:
        return self.samples.column("kind")

    @cached_property
    def digests(self) -> NDArray[numpy.uint64]:
        """Return [n], a digest of each sample's tokens and labels; equal ones are duplicates."""
        return self.samples.column("digest")

    @cached_property
    def _places(self) -> tuple[NDArray[numpy.int32], NDArray[numpy.int64]]:
        return self.samples.column("file"), self.samples.column("record")

    @property
    def total(self) -> Tally:
        """Sum the counts of all records."""
        return sum(self.tallies.values(), Tally())

    def select(self, numbers: Sequence[int] | NDArray[Any]) -> Dataset:
        """Select samples in this order, repeats allowed; the counts stay those of the records."""
        chosen = numpy.asarray(numbers, dtype=numpy.int64)
        return Dataset(self.folder, self.files, chosen if self._numbers is None else self._numbers[chosen])

    def origin(self, number: int) -> str:
        """Name a sample's source file and record."""
        files, records = self._places
        return origin(self.files[files[number]], records[number])

    def distrust(self) -> None:
        """Have the next start tokenize anew, as something is not what is noted here."""
        self.samples.distrust()

    def fingerprint(self) -> str:
        """Digest all tokens and labels: it changes with the records, the prompts, the tokenizer and the limit."""
        if self._numbers is None:
            return self._fingerprint
        return hashlib.sha256(self.digests.tobytes()).hexdigest()


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, *sets: object) -> None:
    """Refuse token ids that a model does not have. A tokenizer may have more of them than the records need.

    Args:
        size: the model's vocab_size.
        sets: those to look at; of any but a `Dataset`, such as a stream, nobody knows the records yet.

    Raises:
        DataError: there are some, or there may be some.
    """
    if len(tokenizer) <= size:
        return
    largest = max(each.total.largest_id if isinstance(each, Dataset) else len(tokenizer) - 1 for each in sets)
    if largest >= size:
        raise DataError(
            f"{tokenizer.name_or_path}: the tokenizer gives ids up to {largest}, but the model's vocab_size is {size}; "
            "expected the tokenizer of this model"
        )

"""What a loader asks of tokenized records: the samples, and what is known of each without reading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy
from numpy.typing import NDArray

from data.tokenized.dataset import supervised_count
from data.tokenized.tokenize import Sample


class SampleSet(Protocol):
    """Tokenized records.

    Attributes:
        lengths: [n], tokens of each sample.
        supervised: [n], how many of them bear loss.
    """

    @property
    def samples(self) -> Sequence[Sample]: ...

    @property
    def lengths(self) -> NDArray[numpy.int32]: ...

    @property
    def supervised(self) -> NDArray[numpy.int32]: ...


@dataclass(frozen=True)
class InMemory:
    """Samples that somebody made without files: a benchmark or a test."""

    samples: Sequence[Sample]

    @cached_property
    def lengths(self) -> NDArray[numpy.int32]:
        return numpy.array([len(sample["input_ids"]) for sample in self.samples], dtype=numpy.int32)

    @cached_property
    def supervised(self) -> NDArray[numpy.int32]:
        return numpy.array([supervised_count(sample) for sample in self.samples], dtype=numpy.int32)

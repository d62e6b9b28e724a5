"""Define tokenized samples as a loader sees them, wherever they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypedDict

import numpy
from numpy.typing import NDArray

IGNORED = -100  # the label of a token that is not trained, as in transformers and torch


class Sample(TypedDict):
    """Hold one tokenized record; both lists have the same length."""

    input_ids: list[int]
    labels: list[int]


class SampleSet(Protocol):
    """Describe samples, and what is known of each without reading it."""

    @property
    def samples(self) -> Sequence[Sample]: ...

    @property
    def lengths(self) -> NDArray[numpy.int32]: ...  # [n], tokens of each sample

    @property
    def supervised(self) -> NDArray[numpy.int32]: ...  # [n], trained tokens of each sample


@dataclass(frozen=True)
class InMemory:
    """Hold samples made without files, for a benchmark or a test."""

    samples: Sequence[Sample]

    @cached_property
    def lengths(self) -> NDArray[numpy.int32]:
        return numpy.array([len(sample["input_ids"]) for sample in self.samples], dtype=numpy.int32)

    @cached_property
    def supervised(self) -> NDArray[numpy.int32]:
        return numpy.array([supervised_count(sample) for sample in self.samples], dtype=numpy.int32)


def supervised_count(sample: Sample) -> int:
    """Count the trained tokens of a sample."""
    return int(numpy.count_nonzero(numpy.asarray(sample["labels"][1:]) != IGNORED))

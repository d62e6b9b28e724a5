"""Define tokenized samples as a loader sees them, wherever they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypedDict

import numpy
from numpy.typing import NDArray

from data.images.image import Image

IGNORED = -100  # the label of a token that is not trained, as in transformers and torch


class Preference(TypedDict, total=False):
    """Hold what a sample of preferences has besides; absent is 0."""

    first: int  # tokens of the first of two documents; 0 where there is one
    value: float  # a pair's margin; 1 for a desirable answer, 0 for another; a class or a score


class Illustrations(TypedDict, total=False):
    """Hold what a sample with images has besides."""

    images: list[Image]  # in order; absent where there is none


class Sample(Preference, Illustrations):
    """Hold one tokenized record; both lists have the same length.

    A pair is two documents, one after the other: the chosen one, then the rejected one, neither of which sees the
    other. So a pair never leaves its row.
    """

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

    @property
    def first(self) -> NDArray[numpy.int32]: ...  # [n], tokens of the first of two documents, or 0

    @property
    def first_supervised(self) -> NDArray[numpy.int32]: ...  # [n], trained tokens of that document, or 0

    @property
    def values(self) -> NDArray[numpy.float32]: ...  # [n], see `Preference`

    @property
    def image_tokens(self) -> NDArray[numpy.int32]: ...  # [n], tokens that features of images take, or 0


class KeptSamples(SampleSet, Protocol):
    """Describe samples that lie in a folder, for whoever keeps something beside them."""

    @property
    def folder(self) -> Path: ...

    @property
    def has_images(self) -> bool: ...

    def distrust(self) -> None: ...  # have the next start tokenize anew, as something is not what is noted here

    def fingerprint(self) -> str: ...  # of the samples and their order

    def __len__(self) -> int: ...


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

    @cached_property
    def first(self) -> NDArray[numpy.int32]:
        return numpy.array([sample.get("first", 0) for sample in self.samples], dtype=numpy.int32)

    @cached_property
    def first_supervised(self) -> NDArray[numpy.int32]:
        counts = [trained_count(sample["labels"][: sample.get("first", 0)]) for sample in self.samples]
        return numpy.array(counts, dtype=numpy.int32)

    @cached_property
    def values(self) -> NDArray[numpy.float32]:
        return numpy.array([sample.get("value", 0.0) for sample in self.samples], dtype=numpy.float32)

    @property
    def has_images(self) -> bool:
        return bool(self.image_tokens.any())

    @cached_property
    def image_tokens(self) -> NDArray[numpy.int32]:
        return numpy.array([image_token_count(sample) for sample in self.samples], dtype=numpy.int32)


def documents(sample: Sample) -> list[Sample]:
    """Split a sample into its documents."""
    first = sample.get("first", 0) or len(sample["input_ids"])
    halves = slice(0, first), slice(first, None)
    made: list[Sample] = [{"input_ids": sample["input_ids"][half], "labels": sample["labels"][half]} for half in halves]
    for image in sample.get("images", []):
        place, before = (0, 0) if image.begin < first else (1, first)
        made[place].setdefault("images", []).append(image._replace(begin=image.begin - before))
    return [each for each in made if len(each["input_ids"])]


def image_token_count(sample: Sample) -> int:
    """Count the tokens of a sample that features of images take."""
    return sum(image.tokens for image in sample.get("images", []))


def supervised_count(sample: Sample) -> int:
    """Count the trained tokens of a sample."""
    first = sample.get("first", 0)
    return trained_count(sample["labels"][:first]) + trained_count(sample["labels"][first:])


def trained_count(labels: Sequence[int]) -> int:
    """Count the trained tokens of a document, whose first token has no predecessor that could predict it."""
    return int(numpy.count_nonzero(numpy.asarray(labels[1:]) != IGNORED))

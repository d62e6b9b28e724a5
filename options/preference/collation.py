"""What losses over whole documents need beside the labels: which tokens are a document's, and what is known of each.

A pair is a sample of two documents, the better answer first. Both lie in one row, so a loss that compares them never
waits for another micro-batch. Answers that come by themselves, with a mark or a class, are samples of one document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.collation import Carried, Collation
from data.loader import GlobalBatch, Loader, Rows


class JudgedCollation(Collation):
    """Samples of one or two documents with a value; the loss is a mean over samples.

    The loss gets `(labels, scale, share, documents, facts, token_scale)`: `documents` [B, S] int64 numbers the
    micro-batch's documents row by row, -1 for padding: of pair i, 2i is chosen and 2i + 1 rejected. `facts`
    [documents, 2] fp32 are a document's reference log-probability (0 if unknown) and its sample's value. `token_scale`
    is for a sum over the trained tokens of the first documents.

    Attributes:
        reference: [n, 1 or 2], log-probabilities of each sample's documents under the reference, where they are known.
        mismatched: a loader of the same samples with answers to other prompts, where the loss needs them.
    """

    reference: NDArray[numpy.float32] | None = None
    mismatched: Loader | None = None

    def documents(self, numbers: Sequence[int]) -> list[list[int]]:
        chosen = list(numbers)
        lengths, firsts = self.data.lengths[chosen].tolist(), self.data.first[chosen].tolist()
        return [[first, length - first] if first else [length] for first, length in zip(firsts, lengths, strict=True)]

    def weight(self, batch: GlobalBatch) -> int:
        return len(batch.samples)

    def carried(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Carried]:
        samples = batch.samples
        tokens = len(samples) * self._mean_chosen if loader.evaluates else self._chosen_tokens(samples)
        token_scale = torch.tensor(loader.n_losses(batch) / (tokens or 1), dtype=torch.float32)
        for rows in batch.micro_batches[replica]:
            yield Carried(last=(*self._documents(rows, loader.shape(rows)), token_scale))

    def part(self, carried: Carried, labels: Tensor, columns: slice, ranks: int) -> Carried:
        documents, facts, token_scale = carried.last
        return Carried(last=(documents[:, columns], facts, token_scale * ranks))

    def _documents(self, rows: Rows, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Number the documents of a micro-batch by token, and list what is known of each."""
        documents = torch.full(shape, -1, dtype=torch.int64)
        facts: list[tuple[float, float]] = []
        for index, row in enumerate(rows):
            begin = 0
            for number, lengths in zip(row, self.documents(row), strict=True):
                known, value = self._reference_of(number), float(self.data.values[number])
                for place, length in enumerate(lengths):
                    documents[index, begin : begin + length] = len(facts)
                    facts.append((known[place], value))
                    begin += length
        return documents, torch.tensor(facts, dtype=torch.float32).reshape(-1, 2)

    def _reference_of(self, number: int) -> list[float]:
        return [0.0, 0.0] if self.reference is None else self.reference[number].tolist()

    @cached_property
    def _mean_chosen(self) -> float:
        return self._chosen_tokens(range(len(self.data.lengths))) / len(self.data.lengths)

    def _chosen_tokens(self, samples: Sequence[int]) -> int:
        """Count the trained tokens of the first documents of samples, or of the only ones."""
        numbers = numpy.asarray(samples)
        first, single = self.data.first_supervised[numbers], self.data.first[numbers] == 0
        return int(numpy.where(single, self.data.supervised[numbers], first).sum())


def judged(loader: Loader) -> JudgedCollation:
    """Return what a loader of judged answers knows of them."""
    found = loader.collation.own
    assert isinstance(found, JudgedCollation)
    return found

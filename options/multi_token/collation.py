"""What the loss of layers ahead needs beside the labels: the tokens, whole rows of labels, and how many it averages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import torch
from torch import Tensor

from data.collation import Carried, Collation
from data.loader import GlobalBatch, Loader
from data.sample_set import IGNORED, SampleSet


class AheadCollation(Collation):
    """Samples of one document each; the loss gets `(labels, scale, share, ids, whole labels, scales)`.

    Args:
        depth: how many layers ahead there are; set when the model is known.
    """

    def __init__(self, data: SampleSet, depth: int = 0) -> None:
        super().__init__(data)
        self.depth = depth
        self._early: dict[int, list[int]] = {}

    def to_last(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return input_ids, labels

    def carried(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Carried]:
        """Yield with each micro-batch what scales its sums, [depth]: the mean is over the global batch's targets."""
        missing = numpy.sum([self._missing(number) for number in batch.samples], axis=0)
        trained = numpy.maximum(batch.supervised - missing, 1)
        scales = torch.from_numpy(loader.n_losses(batch) / trained).float()
        for _ in batch.micro_batches[replica]:
            yield Carried(last=(scales,))

    def part(self, carried: Carried, labels: Tensor, columns: slice, ranks: int) -> Carried:
        input_ids, whole, scales = carried.last  # what is ahead of a rank's last token lies with the next one
        return Carried(last=(input_ids, whole, scales * ranks))

    def _missing(self, number: int) -> list[int]:
        """Count, for each depth, the trained tokens of a sample that come too early to be predicted so far ahead."""
        if number not in self._early:
            first = self.data.samples[number]["labels"][1 : self.depth + 1]
            trained = [label != IGNORED for label in first] + [False] * (self.depth - len(first))
            self._early[number] = numpy.cumsum(trained).tolist()
        return self._early[number]

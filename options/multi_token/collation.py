"""What the loss of layers ahead needs beside the labels: tokens, what each layer predicts, and how many it averages.

It is found on the host, as the trained tokens are: on a GPU the host would wait for their number.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from data.collation import Carried, Collation
from data.loader import GlobalBatch, Loader
from data.sample_set import IGNORED, SampleSet


class AheadCollation(Collation):
    """Samples of one document each; the loss gets `(labels, scale, share, ids, places, words, ..., scales)`.

    `ids` are those of whole rows, [B, S]. Each layer has its places, [T] of B * S tokens, from which it predicts its
    words, [T].

    Args:
        depth: how many layers ahead there are; set when the model is known.
    """

    def __init__(self, data: SampleSet, depth: int = 0) -> None:
        super().__init__(data)
        self.depth = depth

    def to_last(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        found = [input_ids]
        for k in range(1, self.depth + 1):
            targets = targets_ahead(labels, position_ids, k).flatten()
            places = (targets != IGNORED).nonzero().squeeze(-1)
            found += [places, targets[places]]
        return tuple(found)

    def carried(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Carried]:
        """Yield with each micro-batch what scales its sums, [depth]: the mean is over the global batch's targets."""
        missing = numpy.sum([self._missing(number) for number in batch.samples], axis=0)
        trained = numpy.maximum(batch.supervised - missing, 1)
        scales = torch.from_numpy(loader.n_losses(batch) / trained).float()
        for _ in batch.micro_batches[replica]:
            yield Carried(last=(scales,))

    def part(self, carried: Carried, labels: Tensor, columns: slice, ranks: int) -> Carried:
        input_ids, *found, scales = carried.last  # what is ahead of a rank's last token lies with the next one
        own = [input_ids]
        for places, words in zip(found[::2], found[1::2], strict=True):
            row, column = places // labels.shape[1], places % labels.shape[1]
            inside = (column >= columns.start) & (column < columns.stop)
            width = columns.stop - columns.start
            own += [(row * width + column - columns.start)[inside], words[inside]]
        return Carried(last=(*own, scales * ranks))

    def _missing(self, number: int) -> list[int]:
        """Count, for each depth, the trained tokens of a sample that come too early to be predicted so far ahead."""
        first = self.data.samples[number]["labels"][1 : self.depth + 1]
        trained = [label != IGNORED for label in first] + [False] * (self.depth - len(first))
        counts: list[int] = numpy.cumsum(trained).tolist()
        return counts


def further(rows: Tensor, k: int, fill: int = 0) -> Tensor:
    """Move rows [B, S] so that each place has what is `k` further on; `fill` at the end."""
    return F.pad(rows[:, k:], (0, min(k, rows.shape[1])), value=fill)


def targets_ahead(labels: Tensor, position_ids: Tensor, k: int) -> Tensor:
    """Find what the layer `k` (from 1) has to predict at each token, [B, S]: the label k + 1 further on.

    A token of another document is none; positions begin anew with each, and those of padding are negative.
    """
    same = further(position_ids, k + 1, fill=-1) == position_ids + (k + 1)
    return torch.where(same, further(labels, k + 1, fill=IGNORED), IGNORED)

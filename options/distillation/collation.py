"""What a student's loss needs beside the labels: what the teacher says of each trained token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.collation import Carried, Collation
from data.loader import GlobalBatch, Loader, Rows
from models.loss.interface import supervised_positions


class TaughtCollation(Collation):
    """Samples with what is known of each trained token; the loss gets `(labels, scale, share, known)`.

    Attributes:
        known: [trained tokens, ...], sample by sample; sent along where it is given, a row for each trained token of a
            micro-batch in the order of `models.loss.interface.supervised_positions`.
    """

    known: Any = None

    def carried(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Carried]:
        for rows in batch.micro_batches[replica]:
            yield Carried() if self.known is None else Carried(last=(self._of_rows(rows),))

    def part(self, carried: Carried, labels: Tensor, columns: slice, ranks: int) -> Carried:
        if not carried.last:
            return carried
        length = labels.shape[1]
        own = supervised_positions(labels, length) % length
        return Carried(last=(carried.last[0][(own >= columns.start) & (own < columns.stop)],))

    @cached_property
    def first_tokens(self) -> NDArray[numpy.int64]:
        """Return [n + 1], the number of each sample's first trained token, counted sample by sample, and their sum."""
        return numpy.append(0, numpy.cumsum(self.data.supervised, dtype=numpy.int64))

    def _of_rows(self, rows: Rows) -> Tensor:
        first = self.first_tokens
        parts = [self.known[first[number] : first[number + 1]] for number in chain(*rows)]
        return torch.from_numpy(numpy.concatenate(parts or [self.known[0:0]]))


def taught(loader: Loader) -> TaughtCollation:
    """Return what a student's loader knows of its samples' tokens."""
    assert isinstance(loader.collation, TaughtCollation)
    return loader.collation

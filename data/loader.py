"""Cut samples into global batches, spread over rows, micro-batches and replicas.

The order is a pure function of (seed, epoch, position), so a run with other processes sees the same samples at the same
step. A micro-batch has a fixed number of rows, each of one sample or, packed, of several, one after the other; position
ids restart at 0 with each, by which the model keeps them apart. The loss does not depend on which samples share a row
(`models.loss.micro_batch`), so a batch's samples are sorted and packed freely: `batch` packs each global batch,
`dataset` the whole shuffled epoch, in which case a global batch is made of rows. A micro-batch is padded to its own
longest row. The rows are dealt out by length, so that the replicas work on equal lengths at the same time.

What a sample is made of, what the loss is a mean over, and what goes along with a micro-batch beside its tokens is the
objective's to say (`data.collation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, ClassVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.collation import Collation
from data.errors import DataError
from data.packing import best_fit, level
from data.sample_set import IGNORED, SampleSet
from data.settings import Packing

PAD_MULTIPLE = 8  # to which lengths are rounded up: kernels like multiples of eight, and shapes repeat more often

MicroBatch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # what the embedding gets, and what the loss gets
Rows = list[list[int]]  # sample numbers by row


@dataclass(frozen=True)
class GlobalBatch:
    """Hold what one optimizer step trains on."""

    # For each replica, its micro-batches, each a list of rows; as many for every replica.
    micro_batches: list[list[Rows]]
    lengths: list[int]  # of the documents, over all replicas
    tokens: int  # tokens without padding, over all replicas
    supervised: int  # how many of them are trained: the denominator of the loss
    step: int | None = None  # whose batch it is, counted from 0; None where its samples were chosen otherwise

    @property
    def n_micro_batches(self) -> int:
        """Count the micro-batches per replica."""
        return len(self.micro_batches[0])

    @property
    def samples(self) -> list[int]:
        """List the numbers of all samples."""
        rows = chain(*chain(*self.micro_batches))
        return list(chain(*rows))


class Loader:
    """Cut a shuffled set of samples into global batches and these into tensors.

    Args:
        data: the tokenized records.
        batch_size: samples in a global batch; packed sequences with `packing` dataset.
        micro_batch_size: rows in a micro-batch.
        replicas: data-parallel size.
        seed: of the shuffling.
        drop_last: leave out what does not fill an epoch's last global batch; else that batch is smaller.
        packing: what is packed together; False for a row of its own for each sample.
        row_length: the most tokens that are packed into a row.
        numbers: which samples of `data` take part; all where absent.
        least_micro_batches: for each replica in every global batch; where there would be fewer, they have fewer rows.
        same_everywhere: which samples share a micro-batch does not depend on `replicas` and `least_micro_batches`, and
            where there are too few, empty ones are added. That costs time.
        pad_multiple: the lengths of rows are rounded up to a multiple of it.
        collation: what the objective needs of the samples; that of fine-tuning where absent.

    Attributes:
        evaluates: batches are parts of an evaluation: what is a mean over tokens is one over those of all of `data`.
        feeds_embedding: this process has the first layer; others need nothing of what is sent to that beside tokens.
    """

    knows_lengths: ClassVar[bool] = True  # of all samples, before the first step

    def __init__(
        self,
        data: SampleSet,
        batch_size: int,
        micro_batch_size: int,
        replicas: int,
        seed: int,
        drop_last: bool = False,
        packing: Packing = False,
        row_length: int = 0,
        numbers: Sequence[int] | NDArray[Any] | None = None,
        least_micro_batches: int = 0,
        same_everywhere: bool = False,
        pad_multiple: int = PAD_MULTIPLE,
        collation: Collation | None = None,
    ) -> None:
        self.data = data
        self.collation = collation or Collation(data)
        self.evaluates = False
        self.feeds_embedding = True
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.replicas = replicas
        self.seed = seed
        self.packing = packing
        self.row_length = row_length
        self._least = least_micro_batches * replicas
        self._same_everywhere = same_everywhere
        self._pad_multiple = pad_multiple
        # Four bytes a sample for the epoch's order, and four where `numbers` are given.
        self._kind = numpy.int32 if len(data.lengths) < 2**31 else numpy.int64
        self._numbers = None if numbers is None else numpy.array(numbers, self._kind)
        self._epoch = -1
        self.steps_per_epoch = self._count_steps(drop_last)

    @property
    def rows_per_epoch(self) -> int:
        """Count an epoch's packed sequences: the same in each, since the lengths are."""
        return len(self._groups)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step; both are counted from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> GlobalBatch:
        """Return the global batch of a step, counted from 0 over all epochs."""
        first = step % self.steps_per_epoch * self.batch_size
        self._load(self.epoch(step))
        groups = self._groups[first : first + self.batch_size]
        batch = self.batch_of(groups.tolist()) if isinstance(groups, numpy.ndarray) else self._spread(groups)
        return replace(batch, step=step)

    def batch_of(self, chosen: Sequence[int]) -> GlobalBatch:
        """Make a global batch of these samples."""
        if not self.packing:
            return self._spread([[number] for number in chosen])
        lengths = self.data.lengths[numpy.asarray(chosen)].tolist()
        together = (1, 0) if self._same_everywhere else (self.replicas, self._least)
        rows = level(lengths, self.row_length, self.micro_batch_size * together[0], together[1])
        return self._spread([list(map(chosen.__getitem__, row)) for row in rows])

    def tensors(self, batch: GlobalBatch, replica: int) -> Iterator[MicroBatch]:
        """Make micro-batches: `((input_ids, position_ids), (labels, scale, share))`; [B, S] int64 and [] fp32.

        DeepSpeed averages the micro-batches' losses over micro-batches and replicas, so each one's sum is scaled by
        their number over what the objective's mean is over (`Collation.weight`): the trained tokens of the global
        batch, or others. `share` does the same for losses that are no such sum: it is the micro-batch's part of the
        global batch's tokens, times the number of micro-batches. Tensors of the objective come behind those of the
        first tuple and of the second.
        """
        n_losses = self.n_losses(batch)
        scale = torch.tensor(n_losses / max(self.collation.weight(batch), 1), dtype=torch.float32)
        for rows, carried in zip(
            batch.micro_batches[replica], self.collation.carried(self, batch, replica), strict=True
        ):
            input_ids, position_ids, labels = self._collate(rows)
            tokens = sum(self._tokens(row) for row in rows)
            share = torch.tensor(n_losses * tokens / max(batch.tokens, 1), dtype=torch.float32)
            to_last = (*self.collation.to_last(input_ids, position_ids, labels), *carried.last)
            yield (input_ids, position_ids, *carried.first), (labels, scale, share, *to_last)

    def n_losses(self, batch: GlobalBatch) -> int:
        """Count the losses of a batch, one a micro-batch, that are averaged: over all replicas."""
        return batch.n_micro_batches * self.replicas

    def shapes(self, batch: GlobalBatch, replica: int) -> list[tuple[int, int]]:
        """Return rows and length of a replica's micro-batches without making them."""
        return [self.shape(rows) for rows in batch.micro_batches[replica]]

    def layouts(self, batch: GlobalBatch, replica: int) -> list[tuple[Rows, int]]:
        """Return, for each micro-batch of a replica, the document lengths of its rows and the padded length."""
        found = []
        for rows in batch.micro_batches[replica]:
            documents = [list(chain(*self.collation.documents(row))) for row in rows]
            found.append((documents or [[]], self.shape(rows)[1]))
        return found

    def efficiency(self, batches: int = 64) -> float:
        """Measure the share of tokens that are no padding, in the first batches of the first epoch."""
        kept = total = 0
        for step in range(min(batches, self.steps_per_epoch)):
            batch = self.batch(step)
            kept += batch.tokens
            for rows in chain(*batch.micro_batches):
                total += math.prod(self.shape(rows))
        return kept / total

    def _count_steps(self, drop_last: bool) -> int:
        """Count the steps of an epoch."""
        self._load(0)
        whole, rest = divmod(len(self._groups), self.batch_size)
        steps = whole + (1 if rest and not drop_last else 0)
        if not steps:
            what = "rows" if self.packing == "dataset" else "samples"
            raise DataError(
                f"{len(self._groups)} {what} do not fill a batch of train_batch_size {self.batch_size} with "
                "dataloader_drop_last; expected more samples or a smaller batch"
            )
        return steps

    def _spread(self, rows: Rows) -> GlobalBatch:
        """Deal rows out: micro-batch j, of rows of like length, goes to replica j mod replicas."""
        chosen = numpy.asarray(list(chain(*rows)))
        rows = sorted((sorted(row) for row in rows), key=lambda row: (-self._tokens(row), row))
        groups = self._cut(rows)
        groups += [[] for _ in range(self._least - len(groups))]
        groups += [[] for _ in range(-len(groups) % self.replicas)]  # a replica without samples still takes part
        return GlobalBatch(
            micro_batches=[groups[replica :: self.replicas] for replica in range(self.replicas)],
            lengths=list(chain(*self.collation.documents(chosen.tolist()))),
            tokens=int(self.data.lengths[chosen].sum()),
            supervised=int(self.data.supervised[chosen].sum()),
        )

    def _cut(self, rows: Rows) -> list[Rows]:
        """Divide rows into micro-batches; where too few would be full, into as many as needed, as even as can be."""
        size = self.micro_batch_size
        if self._same_everywhere or -(-len(rows) // size) >= self._least:
            return [rows[start : start + size] for start in range(0, len(rows), size)]
        bounds = [len(rows) * group // self._least for group in range(self._least + 1)]
        return [rows[begin:end] for begin, end in pairwise(bounds)]

    def _tokens(self, row: list[int]) -> int:
        return int(self.data.lengths[row].sum()) if row else 0

    def shape(self, rows: Rows) -> tuple[int, int]:
        """Return the shape of a micro-batch of these rows."""
        longest = max((self._tokens(row) for row in rows), default=0)
        return max(len(rows), 1), max(-(-longest // self._pad_multiple), 1) * self._pad_multiple

    def _collate(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape(rows)
        # Padding stands on the right, where no real token attends to it; any id will do. Its position p is -1 - p.
        input_ids = torch.zeros(shape, dtype=torch.int64)
        position_ids = -1 - torch.arange(shape[1]).repeat(shape[0], 1)
        labels = torch.full(shape, IGNORED, dtype=torch.int64)
        for index, row in enumerate(rows):
            begin = 0
            for number, lengths in zip(row, self.collation.documents(row), strict=True):
                sample = self.data.samples[number]
                end = begin + len(sample["input_ids"])
                input_ids[index, begin:end] = torch.tensor(sample["input_ids"])
                labels[index, begin:end] = torch.tensor(sample["labels"])
                for length in lengths:
                    position_ids[index, begin : begin + length] = torch.arange(length)
                    labels[index, begin] = IGNORED  # it has no predecessor of its own document that could predict it
                    begin += length
        return input_ids, position_ids, labels

    def _load(self, epoch: int) -> None:
        """Keep what the global batches of an epoch are cut from: rows or samples."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._groups: Rows | NDArray[Any] = []  # an epoch's order goes before the next one comes
            self._groups = self._rows(epoch) if self.packing == "dataset" else self._order(epoch)

    def _order(self, epoch: int) -> NDArray[Any]:
        """Shuffle the samples of an epoch."""
        count, numbers = len(self.data.lengths), self._numbers
        order = numpy.arange(count, dtype=self._kind) if numbers is None else numbers.copy()
        self._generator(epoch).shuffle(order)  # in place
        return order

    def _generator(self, epoch: int) -> numpy.random.Generator:
        return numpy.random.Generator(numpy.random.PCG64([self.seed, epoch]))

    def _rows(self, epoch: int) -> Rows:
        """Pack an epoch and shuffle it; the earlier shuffling decides which of equal length go together."""
        order = self._order(epoch)
        packed = best_fit(self.data.lengths[order].tolist(), self.row_length)
        return [order[packed[row]].tolist() for row in self._generator(epoch).permutation(len(packed))]

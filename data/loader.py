"""Global batches: which samples a step trains on, and how they are spread over micro-batches and replicas.

The order is a pure function of (seed, epoch, position), so a run with other processes sees the same samples at the same
step. Within a global batch the samples are sorted by length before they are cut into micro-batches: the loss does not
depend on who sits beside whom (contract 4), and a micro-batch is padded only to its own longest sample. Micro-batch j
goes to replica j mod replicas, so that the replicas work on equal lengths at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from data.dataset import supervised_count
from data.errors import DataError
from data.tokenize import IGNORED, Sample

PAD_MULTIPLE = 8  # lengths are rounded up: kernels like multiples of eight, and shapes repeat more often

MicroBatch = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step trains on.

    Attributes:
        micro_batches: for each replica, its micro-batches, each a list of sample numbers; as many for every replica.
        lengths: of the samples, over all replicas.
        tokens: tokens without padding, over all replicas.
        supervised: how many of them bear loss: the denominator of the loss.
    """

    micro_batches: list[list[list[int]]]
    lengths: list[int]
    tokens: int
    supervised: int

    @property
    def n_micro_batches(self) -> int:
        """Micro-batches per replica."""
        return len(self.micro_batches[0])


class Loader:
    """Cuts a shuffled dataset into global batches and these into tensors.

    Args:
        samples: the tokenized records.
        batch_size: samples in a global batch.
        micro_batch_size: samples in a micro-batch.
        replicas: data-parallel size.
        seed: of the shuffling.
        drop_last: leave out the samples that do not fill an epoch's last global batch; else that batch is smaller.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int,
        micro_batch_size: int,
        replicas: int,
        seed: int,
        drop_last: bool = False,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.replicas = replicas
        self.seed = seed
        whole, rest = divmod(len(samples), batch_size)
        self.steps_per_epoch = whole + (1 if rest and not drop_last else 0)
        if not self.steps_per_epoch:
            raise DataError(
                f"{len(samples)} samples do not fill a batch of train_batch_size {batch_size} with "
                "dataloader_drop_last; expected more samples or a smaller batch"
            )

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of a step, counted from 0 over all epochs."""
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.batch_size
        return self.batch_of(self._order(epoch)[first : first + self.batch_size])

    def batch_of(self, chosen: Sequence[int]) -> GlobalBatch:
        """A global batch of these samples."""
        longest_first = sorted(chosen, key=lambda number: (-len(self.samples[number]["input_ids"]), number))
        lengths = [len(self.samples[number]["input_ids"]) for number in longest_first]
        size = self.micro_batch_size
        groups = [longest_first[start : start + size] for start in range(0, len(chosen), size)]
        groups += [[] for _ in range(-len(groups) % self.replicas)]  # a replica without samples still takes part
        return GlobalBatch(
            micro_batches=[groups[replica :: self.replicas] for replica in range(self.replicas)],
            lengths=lengths,
            tokens=sum(lengths),
            supervised=sum(supervised_count(self.samples[number]) for number in chosen),
        )

    def tensors(self, batch: GlobalBatch, replica: int) -> Iterator[MicroBatch]:
        """A replica's micro-batches: `((input_ids, position_ids), (labels, scale, share))`; [B, S] int64 and [] fp32.

        DeepSpeed averages the micro-batches' losses over micro-batches and replicas, so each one's token sum is scaled
        by their number over the supervised tokens of the global batch. `share` does the same for losses that are no sum
        over tokens: it is the micro-batch's part of the global batch's tokens, times the number of micro-batches.
        """
        n_losses = batch.n_micro_batches * self.replicas
        scale = torch.tensor(n_losses / max(batch.supervised, 1), dtype=torch.float32)
        for numbers in batch.micro_batches[replica]:
            input_ids, position_ids, labels = self._collate(numbers)
            tokens = sum(len(self.samples[number]["input_ids"]) for number in numbers)
            share = torch.tensor(n_losses * tokens / max(batch.tokens, 1), dtype=torch.float32)
            yield (input_ids, position_ids), (labels, scale, share)

    def _collate(self, numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        samples = [self.samples[number] for number in numbers]
        longest = max((len(sample["input_ids"]) for sample in samples), default=1)
        shape = (max(len(samples), 1), -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)
        # Padding stands on the right, where no real token attends to it; any id will do. Its position p is -1 - p.
        input_ids = torch.zeros(shape, dtype=torch.int64)
        position_ids = -1 - torch.arange(shape[1]).repeat(shape[0], 1)
        labels = torch.full(shape, IGNORED, dtype=torch.int64)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            input_ids[row, :length] = torch.tensor(sample["input_ids"])
            position_ids[row, :length] = torch.arange(length)
            labels[row, :length] = torch.tensor(sample["labels"])
        return input_ids, position_ids, labels

    def _order(self, epoch: int) -> list[int]:
        generator = numpy.random.Generator(numpy.random.PCG64([self.seed, epoch]))
        order: list[int] = generator.permutation(len(self.samples)).tolist()
        return order

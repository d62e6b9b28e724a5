"""Say what a micro-batch holds of its samples beside their tokens: the half of an objective that data knows.

`data.loader.Loader` spreads samples over rows, micro-batches and replicas, and asks here what they are. An objective
(`training.objective`) that has several documents in a sample, another mean, or tensors of its own subclasses
`Collation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from data.sample_set import SampleSet

if TYPE_CHECKING:
    from data.loader import GlobalBatch, Loader


class Carried(NamedTuple):
    """Hold the tensors of a micro-batch beside ids, positions, labels and scales, by the stage that gets them.

    What stages between those two need goes with the hidden states, from layer to layer (`models.layers`).
    """

    first: tuple[Tensor, ...] = ()  # behind the position ids, for the embedding
    last: tuple[Tensor, ...] = ()  # behind the labels and their scales, for the loss


class Marks(NamedTuple):
    """Hold what every stage has to know of a micro-batch's tokens beside their positions, as models of images need."""

    axes: Tensor | None = None  # [axes, B, S], positions along several axes; None where all are the plain ones
    together: Tensor | None = None  # [B, S], the number of a group whose tokens see each other both ways, else -1


class Collation:
    """What fine-tuning needs: samples of one document, a mean over trained tokens, and no further tensor.

    Args:
        data: the samples, by number.
    """

    def __init__(self, data: SampleSet) -> None:
        self.data = data

    @property
    def own(self) -> Collation:
        """The objective's own, where something was added to it."""
        return self

    def documents(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the lengths of the documents of each of these samples, which do not see each other."""
        return [[length] for length in self.data.lengths[list(numbers)].tolist()]

    def to_last(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return what the loss gets of a micro-batch's tokens [B, S] besides, in front of what it carries."""
        return ()

    def weight(self, batch: GlobalBatch) -> int:
        """Count what the loss of a global batch is a mean over: its trained tokens."""
        return batch.supervised

    def carried(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Carried]:
        """Yield what each micro-batch of a replica carries besides, in their order."""
        for _ in batch.micro_batches[replica]:
            yield Carried()

    def marks(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Marks]:
        """Yield what each micro-batch of a replica has besides on all stages, in their order."""
        for _ in batch.micro_batches[replica]:
            yield Marks()

    def part(self, carried: Carried, labels: Tensor, columns: slice, ranks: int) -> Carried:
        """Take what belongs to some columns of a micro-batch's rows, as one of the ranks that share them has these.

        Args:
            labels: [B, S], of the whole rows.
            columns: of S, which this rank has.
            ranks: how many share the rows. Their losses are averaged, so what scales a sum is multiplied by it.
        """
        assert carried == Carried(), f"{type(self).__name__} does not say how ranks share what it sends"
        return carried

"""Add to micro-batches what images bring: pixels for the first stage, positions and groups of tokens for all.

Which images a micro-batch has is known from its samples, and which batch comes next from its step: while one is trained
on, the images of the next are decoded (`data.images.ahead`), and of no later one, so memory holds two steps' pixels at
most. Processes without the embedding decode nothing; what they need depends on the images' sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from common.placed_document import PlacedDocument
from data.collation import Carried, Collation, Marks
from data.errors import DataError
from data.images.ahead import Decoders, PictureSettings, UnreadableImage, decoders
from data.images.image import Image
from data.sample_set import documents

if TYPE_CHECKING:
    from data.loader import GlobalBatch, Loader, Rows

# Makes `Marks` of a micro-batch [B, S].
Mark = Callable[[Iterable[PlacedDocument], tuple[int, int]], tuple[Tensor | None, Tensor | None]]


class SeeingCollation(Collation):
    """What an objective needs of samples with images, beside what it needs of their text.

    Args:
        inner: the objective's own.
        settings: of the model's processor.
        inputs: the tensors that the embedding takes for the images of a micro-batch, in order.
        mark: says of a micro-batch's documents what all stages have to know, for a model that has to know anything.
        distrust: has the next start read the records anew, as an image is not what it was.
    """

    def __init__(
        self,
        inner: Collation,
        settings: PictureSettings,
        inputs: tuple[str, ...],
        mark: Mark | None = None,
        distrust: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(inner.data)
        self._inner = inner
        self._settings = settings
        self._inputs = inputs
        self._mark = mark
        self._distrust = distrust
        self._coming: tuple[list[Rows], list[int | None]] | None = None  # micro-batches, and tickets for their images

    @property
    def own(self) -> Collation:
        return self._inner.own

    def documents(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._inner.documents(numbers)

    def to_last(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return self._inner.to_last(input_ids, position_ids, labels)

    def weight(self, batch: GlobalBatch) -> int:
        return self._inner.weight(batch)

    def part(self, carried: Carried, labels: Tensor, columns: slice, ranks: int) -> Carried:
        return self._inner.part(carried, labels, columns, ranks)

    def carried(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Carried]:
        inner = self._inner.carried(loader, batch, replica)
        if not loader.feeds_embedding:
            yield from inner
            return

        micro_batches = batch.micro_batches[replica]
        due = self._due(micro_batches)
        if (following := _following(loader, batch)) is not None:
            self._coming = following.micro_batches[replica], self._ask(following.micro_batches[replica])
        taken = 0
        try:
            for ticket, carried in zip(due, inner, strict=True):
                taken += 1
                images = self._taken(ticket) if ticket is not None else {}
                yield carried._replace(first=(*images.values(), *carried.first))
        finally:
            self._drop(due[taken:])  # of a batch that nobody took as a whole

    def marks(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Marks]:
        for rows in batch.micro_batches[replica]:
            if self._mark is None or not self._of(rows):
                yield Marks()
            else:
                yield Marks(*self._mark(self._parts(rows), loader.shape(rows)))

    def _taken(self, ticket: int) -> dict[str, Tensor]:
        """Wait for the tensors of a micro-batch's images."""
        try:
            return self._decoders.take(ticket)
        except UnreadableImage as error:
            self._distrust()
            raise DataError(f"{error}; started again, a run reads the records anew") from None

    def _of(self, rows: Rows) -> list[Image]:
        """List the images of rows, in the order of their tokens."""
        samples = (self.data.samples[number] for number in chain(*rows))
        return list(chain.from_iterable(sample.get("images", ()) for sample in samples))

    def _parts(self, rows: Rows) -> Iterator[PlacedDocument]:
        """Yield each document of rows."""
        for row, numbers in enumerate(rows):
            begin = 0
            for sample in map(self.data.samples.__getitem__, numbers):
                for document in documents(sample):
                    ids = torch.from_numpy(numpy.asarray(document["input_ids"], dtype=numpy.int64))
                    yield PlacedDocument(row, begin, ids, _shapes(document.get("images", [])))
                    begin += len(ids)

    @property
    def _decoders(self) -> Decoders:
        return decoders(self._settings, self._inputs)

    def _due(self, micro_batches: list[Rows]) -> list[int | None]:
        """Return the tickets for micro-batches' images, as they were asked for ahead, or else now."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == micro_batches:
            return coming[1]
        if coming is not None:
            self._drop(coming[1])
        return self._ask(micro_batches)

    def _ask(self, micro_batches: list[Rows]) -> list[int | None]:
        """Ask for the images of each micro-batch that has some."""
        images = [self._of(rows) for rows in micro_batches]
        wanted = [each for each in images if each]
        tickets = iter(self._decoders.ask(wanted) if wanted else ())
        return [next(tickets) if each else None for each in images]

    def _drop(self, tickets: Sequence[int | None]) -> None:
        if known := [ticket for ticket in tickets if ticket is not None]:
            self._decoders.drop(known)


def _shapes(images: Sequence[Image]) -> dict[str, Tensor]:
    """Join what the processor gives of images beside their pixels; nothing of none."""
    joined = {}
    for name in images[0].shape if images else ():
        joined[name] = torch.cat([torch.tensor(image.shape[name]) for image in images])
    return joined


def _following(loader: Loader, batch: GlobalBatch) -> GlobalBatch | None:
    """Return the batch behind this one; None behind an evaluation's last, or where that is not known."""
    if batch.step is None or (loader.evaluates and batch.step + 1 == loader.steps_per_epoch):
        return None
    return loader.batch(batch.step + 1)

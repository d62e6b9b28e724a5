"""Add to micro-batches what images bring: pixels for the first stage, positions and groups of tokens for all.

Which images a micro-batch has is known from its samples, and which batch comes next from its step: while one is trained
on, the images of the next are decoded (`data.images.ahead`), and of no later one, so memory holds two steps' pixels at
most. Processes without the embedding decode nothing; what they need depends on the images' sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from data.collation import Carried, Collation, Marks
from data.images.ahead import Decoders, PictureSettings, decoders
from data.images.image import Image

if TYPE_CHECKING:
    from data.loader import GlobalBatch, Loader, Rows

# Makes a document's positions along a model's axes, [axes, L], of its ids [L] and what its images' shapes are, by name.
Axes = Callable[[Tensor, dict[str, Tensor]], Tensor]


class SeeingCollation(Collation):
    """What an objective needs of samples with images, beside what it needs of their text.

    Args:
        inner: the objective's own.
        settings: of the model's processor.
        inputs: the tensors that the embedding takes for the images of a micro-batch, in order.
        axes: makes positions, for a model that has them along several axes.
        both_ways: the token of which those of an image see each other both ways, if they do.
    """

    def __init__(
        self,
        inner: Collation,
        settings: PictureSettings,
        inputs: tuple[str, ...],
        axes: Axes | None = None,
        both_ways: int | None = None,
    ) -> None:
        super().__init__(inner.data)
        self._inner = inner
        self._settings = settings
        self._inputs = inputs
        self._axes = axes
        self._both_ways = both_ways
        self._coming: tuple[list[Rows], list[int | None]] | None = None  # micro-batches, and tickets for their images

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
                images = self._decoders.take(ticket) if ticket is not None else {}
                yield carried._replace(first=(*images.values(), *carried.first))
        finally:
            self._drop(due[taken:])  # of a batch that nobody took as a whole

    def marks(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Marks]:
        for rows in batch.micro_batches[replica]:
            if not self._of(rows):
                yield Marks()
                continue
            shape = loader.shape(rows)
            yield Marks(
                None if self._axes is None else self.axes(rows, shape, self._axes),
                None if self._both_ways is None else self.together(rows, shape, self._both_ways),
            )

    def axes(self, rows: Rows, shape: tuple[int, int], of_document: Axes) -> Tensor:
        """Make positions along several axes, [axes, B, S]: those of each document, and plain ones for padding."""
        made = []
        for row, begin, ids, images in self._parts(rows):
            own = of_document(ids, _shapes(images)) if images else torch.arange(len(ids))[None]
            made.append((row, begin, own))
        positions = torch.arange(shape[1]).repeat(max(len(own) for *_, own in made), shape[0], 1)
        for row, begin, own in made:
            positions[:, row, begin : begin + own.shape[1]] = own
        return positions

    def together(self, rows: Rows, shape: tuple[int, int], token: int) -> Tensor:
        """Number the runs of a token in a micro-batch's documents where they stand, [B, S]; -1 elsewhere."""
        numbers = torch.full(shape, -1)
        count = 0
        for row, begin, ids, _ in self._parts(rows):
            seen = ids == token
            starts = seen & ~torch.cat([seen.new_zeros(1), seen[:-1]])
            numbers[row, begin : begin + len(ids)][seen] = (count - 1 + starts.cumsum(0))[seen]
            count += int(starts.sum())
        return numbers

    def _of(self, rows: Rows) -> list[Image]:
        """List the images of rows, in the order of their tokens."""
        samples = (self.data.samples[number] for number in chain(*rows))
        return list(chain.from_iterable(sample.get("images", ()) for sample in samples))

    def _parts(self, rows: Rows) -> Iterator[tuple[int, int, Tensor, list[Image]]]:
        """Yield each document of rows: its row, where it begins there, its ids and its images."""
        for row, numbers in enumerate(rows):
            begin = 0
            for number, lengths in zip(numbers, self.documents(numbers), strict=True):
                sample = self.data.samples[number]
                ids = torch.from_numpy(numpy.asarray(sample["input_ids"], dtype=numpy.int64))
                images = sample.get("images", [])
                for end, length in zip(accumulate(lengths), lengths, strict=True):
                    first = end - length
                    yield row, begin + first, ids[first:end], [each for each in images if first <= each.begin < end]
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
    """Join what the processor gives of images beside their pixels."""
    joined = {}
    for name in images[0].shape:
        joined[name] = torch.cat([torch.tensor(image.shape[name]) for image in images])
    return joined


def _following(loader: Loader, batch: GlobalBatch) -> GlobalBatch | None:
    """Return the batch behind this one; None behind an evaluation's last, or where that is not known."""
    if batch.step is None or (loader.evaluates and batch.step + 1 == loader.steps_per_epoch):
        return None
    return loader.batch(batch.step + 1)

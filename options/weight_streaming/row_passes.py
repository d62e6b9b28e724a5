"""Pass a micro-batch through one layer, forward, or forward again and back: its rows whole, or chunk by chunk.

With rows in chunks (`models.attention.chunks`) the activations inside of the layer are those of one chunk at a time.
Whole rows have only their hidden states, the gradients of these, and the layer's keys and values.

Backward passes go from a row's last chunk to its first, and each needs the keys and values of all chunks before it. So
these are made first, without gradients. The first chunk passes the whole layer, which shows which module attends last;
the other chunks' passes end there. Then each chunk passes again, with gradients, and back. Cost: one chunk's forward
pass, and of the other chunks what comes before attention; linear attention, which hands on its states, passes whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy
import torch
from torch import Tensor, nn

from models.attention.chunks import RowChunk, RowMemory
from models.attention.packed import Documents
from models.loss.interface import supervised_positions
from options.weight_streaming.streamed_model import LoadedLayers, StreamedModel
from training.engine.trainer import Sent


@dataclass(frozen=True)
class Batch:
    """The micro-batches of one replica in a step or an evaluation.

    Attributes:
        shapes: rows and length of each.
        cuts: tokens of each chunk of their rows; a single number for whole rows.
        place, kept: bytes of the largest input of a layer, and of the largest products that a block keeps, over all
            replicas.
        seed: (seed, step, replica) of the random generator; None in an evaluation, which draws nothing.
        scale: loss scale of the backward pass; the sums of gradients are divided by it.
    """

    micro_batches: Iterator[Sent]
    documents: Sequence[Documents]
    shapes: Sequence[tuple[int, int]]
    cuts: Sequence[Sequence[int]]
    place: int
    seed: tuple[int, ...] | None = None
    scale: float = 1.0
    kept: int = 0


class RowPasses:
    """The passes of micro-batch `number` of a batch; `position_ids` [B, S] are those of whole rows."""

    def __init__(self, model: StreamedModel, batch: Batch, number: int, position_ids: Tensor) -> None:
        self._model, self._batch, self._number, self._position_ids = model, batch, number, position_ids
        self._bounds = list(pairwise(accumulate(batch.cuts[number], initial=0)))

    @torch.no_grad()
    def forward(self, layer: int, given: Sequence[Tensor]) -> list[Tensor]:
        """Return what a layer makes of hidden states [B, S, H], or of ids [B, S], and router sums."""
        if self._whole(layer):
            return self._compute(layer, given)
        hidden, *sums = given
        outputs = torch.empty_like(hidden)
        for chunk in self._chunks(_LayerMemory(hidden.shape[1])):
            own, *sums = self._compute(layer, [chunk.own(hidden, 1), *sums], chunk)
            outputs[:, chunk.columns] = own
        return [outputs, *sums]

    def backward(
        self, layer: int, given: Sequence[Tensor], gradients: Sequence[Tensor], loaded: LoadedLayers, first: bool
    ) -> Sequence[Tensor]:
        """Compute a layer again and go back; return the gradients of what it was given.

        Args:
            gradients: of what it made; in chunks the returned ones take their place.
            first: whether the gradients of its weights, which `loaded` takes, are the step's first ones.
        """
        scale = self._batch.scale
        if self._whole(layer):
            inputs = [_leaf(each) for each in given] if layer else list(given)
            torch.autograd.backward(self._compute(layer, inputs), gradients)
            loaded.take_gradients(layer, first, scale)
            return _gradients(inputs)

        hidden, *sums = given
        gradient, *of_sums = gradients
        memory = _LayerMemory(hidden.shape[1])
        chunks = self._chunks(memory)
        with torch.no_grad():
            memory.filling = True
            for chunk in chunks[:-1]:
                with suppress(_Filled):
                    self._compute(layer, [chunk.own(hidden, 1), *sums], chunk)
            memory.filling = False

        for chunk in reversed(chunks):
            own = _leaf(chunk.own(hidden, 1))
            outputs = self._compute(layer, [own, *map(_leaf, sums)], chunk)
            torch.autograd.backward(outputs, [chunk.own(gradient, 1), *of_sums])
            # At once, as sums are fp32 and a weight's gradient may not be.
            loaded.take_gradients(layer, first and chunk is chunks[-1], scale)
            gradient[:, chunk.columns] = _gradients([own])[0]
        return gradients  # each chunk's router sums are added to those before, whose gradient so is the same

    def loss(
        self, layer: int, given: Sequence[Tensor], labels: tuple[Tensor, ...], loaded: LoadedLayers, first: bool
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Compute the loss of the last layer's output; in a step, go back: gradients take the place of hidden states.

        Returns:
            The loss, and the gradients of what the layer was given.
        """
        hidden, *sums = given
        losses, gradients, trains = [], list[Tensor](), self._batch.seed is not None
        for columns, of_part in self._label_parts(labels):
            own = [hidden[:, columns].contiguous(), *sums]
            inputs = [_leaf(each) for each in own] if trains else own
            normalised, *others = self._compute(layer, inputs)
            loss = self._model.loss((normalised, self._position_ids, *others), of_part)
            losses.append(loss.detach())
            if trains:
                (loss * self._batch.scale / len(self._batch.shapes)).backward()
                loaded.take_gradients(layer, first and columns.start == 0, self._batch.scale)
                gradients = _gradients(inputs)
                hidden[:, columns] = gradients[0]
        return sum(losses[1:], losses[0]), [hidden, *gradients[1:]]

    def _label_parts(self, labels: tuple[Tensor, ...]) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """Yield the columns of each chunk, and its labels with the one behind them; whole rows have one."""
        if len(self._bounds) == 1:
            yield slice(0, None), labels
            return
        targets, scale, share, *trained, _ = labels  # last come the trained positions of whole rows
        for (begin, end), positions in zip(self._bounds, trained, strict=True):
            # The router loss, of all tokens, counts once.
            counts = share if end == targets.shape[1] else torch.zeros_like(share)
            yield slice(begin, end), (targets[:, begin : end + 1], scale, counts, positions)

    def _whole(self, layer: int) -> bool:
        """Return whether rows pass a layer whole: the embedding keeps nothing of them."""
        return layer == 0 or len(self._bounds) == 1

    def _chunks(self, memory: RowMemory) -> list[RowChunk]:
        return [RowChunk(slice(begin, end), memory) for begin, end in self._bounds]

    def _compute(self, layer: int, given: Sequence[Tensor], chunk: RowChunk | None = None) -> list[Tensor]:
        if self._batch.seed is not None:
            drawn = [*self._batch.seed, self._number, layer, *([] if chunk is None else [chunk.columns.start])]
            torch.manual_seed(int(numpy.random.SeedSequence(drawn).generate_state(1)[0]))

        # Each pass of a chunk comes with a memory of its own, by which the layer knows that it is another one.
        position_ids = self._position_ids if chunk is None else self._position_ids.clone()
        documents = self._batch.documents[self._number]
        self._model.positions[0].expect([documents], () if chunk is None else [chunk])

        first, *others = given
        hidden, _, *sums = self._model.layer(layer)((first, position_ids, *others))
        return [hidden, *sums]


def trained_in_chunks(targets: Tensor, cuts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the `supervised_positions` of each chunk of labels [B, S] on the host; nothing for whole rows."""
    for begin, end in pairwise(accumulate(cuts if len(cuts) > 1 else (), initial=0)):
        yield supervised_positions(targets[:, begin : end + 1], end - begin)


class _Filled(Exception):
    """Ends a pass that was to leave keys and values only."""


class _LayerMemory(RowMemory):
    """What one layer keeps of a micro-batch; while it is `filling`, passes end where the last module attends."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.filling = False
        self._last: nn.Module | None = None  # of the first chunk, whose pass goes on

    def extend(self, module: nn.Module, key: Tensor, value: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        extended = super().extend(module, key, value, begin)
        if begin == 0:
            self._last = module
        elif self.filling and module is self._last:
            raise _Filled
        return extended


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _gradients(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs' gradients; zeros where the loss does not depend on one (router sums without a router loss)."""
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in inputs if each.requires_grad]

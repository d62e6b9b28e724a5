"""Compute the micro-batches of a step in turns: GPU p mod n has turn p, which is slot p mod S of S.

The slots are a few layers forward, then the head, forward and backward at once, then a few layers backward. A turn does
one slot's work for all micro-batches of a round, one after the other, each as soon as the turn before has handed it on.
After a round's last slot comes the first one of the next round. So a place for a micro-batch is free when it begins:
the last slot has had the one before it there.

A forward slot keeps the input of each of its layers. A backward slot takes its layers one at a time, the last one
first: forward again from that input, then backward. So a process holds the activations of one layer, the weights of two
slots, and nothing that grows with the number of layers.

Random numbers are drawn by (seed, step, micro-batch, layer): those of the recomputation are the forward pass's, and no
number depends on which process computes what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import numpy
import torch
from torch import Tensor

from models.attention.packed import Documents
from training.distributed.shared_memory import share_tensors
from training.engine.handover import Handover
from training.engine.streamed_model import LoadedLayers, StreamedModel
from training.engine.trainer import Sent
from training.topology import Slots, layer_ranges


class Slot(NamedTuple):
    """The work of a turn."""

    kind: Literal["forward", "head", "backward"]
    layers: range


def slots_of(slots: Slots) -> list[Slot]:
    """List the slots of a round in their order."""
    forward, backward = (layer_ranges(layers) for layers in (slots.forward, slots.backward))
    head = forward[-1][1]
    return [
        *(Slot("forward", range(*bounds)) for bounds in forward),
        Slot("head", range(head, head + 1)),
        *(Slot("backward", range(*bounds)) for bounds in reversed(backward)),
    ]


@dataclass(frozen=True)
class Batch:
    """The micro-batches of a step or an evaluation that one replica computes.

    Attributes:
        shapes: rows and length of each.
        place: the most bytes that a layer's input takes, in any replica.
        seed: of all that is random, without the micro-batch and the layer; None in an evaluation, which draws nothing.
    """

    micro_batches: Iterator[Sent]
    documents: Sequence[Documents]
    shapes: Sequence[tuple[int, int]]
    place: int
    seed: tuple[int, ...] | None = None


class Turns:
    """This process's turns.

    Args:
        pool: the ranks that take turns, this one among them.

    Attributes:
        handover: between them.
    """

    def __init__(self, model: StreamedModel, slots: Slots, pool: Sequence[int]) -> None:
        self._model, self._slots, self._a_round = model, slots_of(slots), slots.a_round
        self._head = model.spec.n_layers - 1
        self._gpus, self._own = len(pool), pool.index(torch.distributed.get_rank())
        # Of each slot, the micro-batches that it has handed on, and those whose gradients are in the sums.
        self.handover = Handover(pool, model.device, counts=2 * len(self._slots))
        self._total = share_tensors({"loss": torch.empty(1, dtype=torch.float64, device="meta")}, pool, model.device)
        self._before = 0  # micro-batches of all earlier batches: counts go on
        self._computed: deque[torch.cuda.Event] = deque()

    def run(self, batch: Batch) -> float:
        """Compute a batch's micro-batches, and sum their gradients where it has a seed; return their mean loss.

        All processes of all pools call it together. It returns when those of this pool have done all.
        """
        training, number = batch.seed is not None, len(batch.shapes)
        slots = [slot for slot in self._slots if training or slot.kind != "backward"]
        self.handover.make_room(self._a_round * self._head, batch.place)
        self._model.train(training)
        mine = [
            (begin, index)
            for a_round, begin in enumerate(range(0, number, self._a_round))
            for index in range(len(slots))
            # In an evaluation, one process has the head for all micro-batches, in their order.
            if (a_round * len(slots) * training + index) % self._gpus == self._own
        ]
        turns = [LoadedLayers(self._model, slots[index].layers, self.handover.arriving) for _, index in mine]
        at, sent = -self._a_round, list[Sent]()
        with torch.set_grad_enabled(training):
            for turn, (begin, index) in enumerate(mine):
                while at < begin:
                    at, sent = at + self._a_round, list(islice(batch.micro_batches, self._a_round))
                self._take(_Turn(batch, slots[index], index, begin, len(slots)), sent, *turns[turn : turn + 2])
                turns[turn] = LoadedLayers(self._model, (), None)  # frees what it held
        deque(batch.micro_batches, maxlen=0)
        self._before += number
        for index in range(len(slots)):
            self.handover.wait(2 * index + 1, self._before)
        loss = float(self._total["loss"]) / number
        self.handover.meet()
        return loss

    def _take(
        self, turn: _Turn, sent: Sequence[Sent], loaded: LoadedLayers, following: LoadedLayers | None = None
    ) -> None:
        """Take a turn, and let the weights of the following one come meanwhile."""
        kind, index, begin = turn.slot.kind, turn.number, turn.begin
        adds = turn.batch.seed is not None and kind != "forward"
        loaded.fetch_weights()
        if begin:
            self.handover.wait(2 * index + 1, self._before + begin)  # the sums have all of the round before
        if adds:
            loaded.fetch_sums(begun=begin > 0)
        loaded.use()
        self._model.positions[0].expect(turn.batch.documents[begin : begin + len(sent)])
        losses = []
        for lane, micro_batch in enumerate(sent):
            self._wait_for(turn, lane)
            if following and lane == min(2, len(sent) - 1):  # so the device has finished the turn before
                following.fetch_weights()
            if kind == "forward":
                self._forward(turn, lane, micro_batch)
            elif kind == "backward":
                self._backward(turn, lane, micro_batch, loaded)
            else:
                losses.append(self._both(turn, lane, micro_batch, loaded))
            self.handover.count(2 * index, self._before + begin + lane + 1)
        if losses:
            total = 0.0 if begin == 0 else float(self._total["loss"])
            for loss in torch.stack(losses).tolist():
                total += loss
            self._total["loss"].fill_(total)
        loaded.give_back(self.handover.leaving)
        self.handover.count(2 * index + 1, self._before + begin + len(sent))

    def _wait_for(self, turn: _Turn, lane: int) -> None:
        """Wait until a micro-batch has been handed on, and its place is free; on a GPU no more than two are queued."""
        number = self._before + turn.begin + lane + 1
        if turn.number:
            self.handover.wait(2 * (turn.number - 1), number)
        elif turn.begin:
            self.handover.wait(2 * (turn.slots - 1), number - self._a_round)
        if self._model.device.type == "cuda":
            self._computed.append(torch.cuda.current_stream(self._model.device).record_event())
            if len(self._computed) > 2:
                self._computed.popleft().synchronize()

    def _forward(self, turn: _Turn, lane: int, micro_batch: Sent) -> None:
        layers, (ids, position_ids) = turn.slot.layers, micro_batch[0]
        given = self._get(turn, lane, layers.start) if layers.start else [ids]
        with torch.no_grad():
            for layer in layers:
                if layer > layers.start and turn.batch.seed is not None:
                    self.handover.put(self._place(lane, layer), given)
                given = self._compute(turn, lane, layer, given, position_ids)
        self.handover.put(self._place(lane, layers.stop), given)

    def _backward(self, turn: _Turn, lane: int, micro_batch: Sent, loaded: LoadedLayers) -> None:
        layers, (ids, position_ids) = turn.slot.layers, micro_batch[0]
        gradients = self._get(turn, lane, layers.stop)
        for layer in reversed(layers):
            inputs = [_leaf(each) for each in self._get(turn, lane, layer)] if layer else [ids]
            outputs = self._compute(turn, lane, layer, inputs, position_ids)
            torch.autograd.backward(outputs, gradients)
            loaded.take_gradients(layer, first=turn.begin + lane == 0)
            gradients = _gradients(inputs)
        if layers.start:
            self.handover.put(self._place(lane, layers.start), gradients)

    def _both(self, turn: _Turn, lane: int, micro_batch: Sent, loaded: LoadedLayers) -> Tensor:
        """Compute the loss, and the gradient of the head's input."""
        (_, position_ids), labels = micro_batch
        given = self._get(turn, lane, self._head)
        if turn.batch.seed is None:
            hidden, *sums = self._compute(turn, lane, self._head, given, position_ids)
            return self._model.loss((hidden, position_ids, *sums), labels)
        inputs = [_leaf(each) for each in given]
        hidden, *sums = self._compute(turn, lane, self._head, inputs, position_ids)
        loss = self._model.loss((hidden, position_ids, *sums), labels)
        (loss / len(turn.batch.shapes)).backward()
        loaded.take_gradients(self._head, first=turn.begin + lane == 0)
        self.handover.put(self._place(lane, self._head), _gradients(inputs))
        return loss.detach()

    def _compute(
        self, turn: _Turn, lane: int, layer: int, given: Sequence[Tensor], position_ids: Tensor
    ) -> list[Tensor]:
        if turn.batch.seed is not None:
            drawn = numpy.random.SeedSequence([*turn.batch.seed, turn.begin + lane, layer]).generate_state(1)
            torch.manual_seed(int(drawn[0]))
        first, *others = given
        hidden, _, *sums = self._model.layer(layer)((first, position_ids, *others))
        return [hidden, *sums]

    def _get(self, turn: _Turn, lane: int, layer: int) -> list[Tensor]:
        like = self._model.activations_like(*turn.batch.shapes[turn.begin + lane])
        return self.handover.get(self._place(lane, layer), like)

    def _place(self, lane: int, layer: int) -> int:
        """Return the place of a layer's input, and of its gradient."""
        return lane * self._head + layer - 1


class _Turn(NamedTuple):
    """A turn: which slot's, of how many, and its first micro-batch."""

    batch: Batch
    slot: Slot
    number: int
    begin: int
    slots: int


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _gradients(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients of inputs; zeros of one that the loss does not depend on (router sums without a router loss)."""
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in inputs if each.requires_grad]

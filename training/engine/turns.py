"""Compute the micro-batches of a step in turns: GPU p mod n has turn p, which is slot p mod S of S.

The slots are a few layers forward, then the head, forward and backward at once, then a few layers backward. A turn does
one slot's work for all micro-batches of a round, one after the other, each as soon as the turn before has handed it on.
After a round's last slot comes the first one of the next round. So a place for a micro-batch is free when it begins:
the last slot has had the one before it there.

A head that takes longer than other slots has several: of h, slot k has each h-th micro-batch from the k-th on, and sums
of its own, which `HostEngine.sum_up` adds up.

A forward slot keeps the input of each of its layers. A backward slot takes its layers one at a time, the last one
first: forward again from that input, then backward. So a process holds the activations of one layer, the weights of two
slots, and nothing that grows with the number of layers.

Random numbers are drawn by (seed, step, micro-batch, layer): those of the recomputation are the forward pass's, and no
number depends on which process computes what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy
import torch
from torch import Tensor

from models.attention.packed import Documents
from training.distributed.shared_memory import share_tensors
from training.engine.handover import Handover
from training.engine.streamed_model import LoadedLayers, StreamedModel
from training.engine.trainer import Sent
from training.schedule.weight_streaming import own_lanes
from training.topology import Slots, layer_ranges

Passes = Literal["forward", "head", "backward"]


class Slot(NamedTuple):
    """The work of a turn; `share` as in `training.schedule.weight_streaming.Slot`."""

    kind: Passes
    layers: range
    share: tuple[int, int] = (0, 1)


def slots_of(slots: Slots) -> list[Slot]:
    """List the slots of a round in their order."""
    forward, backward = (layer_ranges(layers) for layers in (slots.forward, slots.backward))
    head = forward[-1][1]
    return [
        *(Slot("forward", range(*bounds)) for bounds in forward),
        *(Slot("head", range(head, head + 1), (part, slots.heads)) for part in range(slots.heads)),
        *(Slot("backward", range(*bounds)) for bounds in reversed(backward)),
    ]


@dataclass(frozen=True)
class Batch:
    """The micro-batches of a step or an evaluation that one replica computes.

    Attributes:
        shapes: rows and length of each.
        place: the most bytes that a layer's input takes, in any replica.
        seed: of all that is random, without the micro-batch and the layer; None in an evaluation, which draws nothing.
        scale: of the loss whose gradients are computed; their sums are without it.
    """

    micro_batches: Iterator[Sent]
    documents: Sequence[Documents]
    shapes: Sequence[tuple[int, int]]
    place: int
    seed: tuple[int, ...] | None = None
    scale: float = 1.0


class Turns:
    """This process's turns.

    Args:
        pool: the ranks that take turns, this one among them.

    Attributes:
        handover: between them.
        work: kind of slot -> what computes a micro-batch, given the turn, the lane, the micro-batch and the weights.
    """

    def __init__(self, model: StreamedModel, slots: Slots, pool: Sequence[int]) -> None:
        self._model, self._slots, self._a_round = model, slots_of(slots), slots.a_round
        self._head, self._heads, self._first_head = model.spec.n_layers - 1, slots.heads, len(slots.forward)
        self._gpus, self._own = len(pool), pool.index(torch.distributed.get_rank())
        # Of each slot, the micro-batches that it has handed on, and those whose gradients are in the sums.
        self.handover = Handover(pool, model.device, counts=2 * len(self._slots))
        like = torch.empty(slots.heads, dtype=torch.float64, device="meta")
        self._total = share_tensors({"loss": like}, pool, model.device)["loss"]
        self._before = 0  # micro-batches of all earlier batches: counts go on
        self._computed: deque[torch.cuda.Event] = deque()
        self.work: dict[Passes, Callable[..., Any]] = {
            "forward": self._forward,
            "head": self._both,
            "backward": self._backward,
        }

    def run(self, batch: Batch) -> float:
        """Compute a batch's micro-batches, and sum their gradients where it has a seed; return their mean loss.

        All processes of all pools call it together. It returns when those of this pool have done all.
        """
        training, number = batch.seed is not None, len(batch.shapes)
        slots = self._slots
        if not training:  # one process has the head for all micro-batches, in their order
            slots = [*slots[: self._first_head], Slot("head", slots[self._first_head].layers)]
        self.handover.make_room(self._a_round * self._head, batch.place)
        self._model.train(training)
        mine = [
            (begin, index)
            for a_round, begin in enumerate(range(0, number, self._a_round))
            for index in range(len(slots))
            if (a_round * len(slots) * training + index) % self._gpus == self._own
        ]
        turns = [
            LoadedLayers(self._model, slot.layers, self.handover.arriving, slot.share[0])
            for slot in (slots[index] for _, index in mine)
        ]
        at, sent = -self._a_round, list[Sent]()
        with torch.set_grad_enabled(training):
            for turn, (begin, index) in enumerate(mine):
                while at < begin:
                    at, sent = at + self._a_round, list(islice(batch.micro_batches, self._a_round))
                self._take(Turn(batch, slots[index], index, begin, len(slots)), sent, *turns[turn : turn + 2])
                turns[turn] = LoadedLayers(self._model, (), None)  # frees what it held
        deque(batch.micro_batches, maxlen=0)
        self._before += number
        for index in range(len(slots)):
            self.handover.wait(2 * index + 1, self._before)
        loss = float(self._total[: self._heads if training else 1].sum()) / number
        self.handover.meet()
        return loss

    def _take(
        self, turn: Turn, sent: Sequence[Sent], loaded: LoadedLayers, following: LoadedLayers | None = None
    ) -> None:
        """Take a turn, and let the weights of the following one come meanwhile."""
        (kind, _, share), index, begin = turn.slot, turn.number, turn.begin
        lanes = own_lanes(share, begin, begin + len(sent))
        adds = turn.batch.seed is not None and kind != "forward"
        loaded.fetch_weights()
        if begin:
            self.handover.wait(2 * index + 1, self._before + begin)  # the sums have all of the round before
        if adds:
            loaded.fetch_sums(begun=begin > 0)
        loaded.use()
        if not (lanes or begin):
            loaded.clear_sums()
        self._model.positions[0].expect([turn.batch.documents[begin + lane] for lane in lanes])
        losses = []
        for done, lane in enumerate(lanes):
            micro_batch = sent[lane]
            self._wait_for(turn, lane)
            if following and done == min(2, len(lanes) - 1):  # so the device has finished the turn before
                following.fetch_weights()
            losses.append(self.work[kind](turn, lane, micro_batch, loaded))
            self.handover.count(2 * index, self._before + begin + lane + 1)
        if kind == "head":
            total = 0.0 if begin == 0 else float(self._total[share[0]])
            for loss in torch.stack(losses).tolist() if losses else ():
                total += loss
            self._total[share[0]] = total
        loaded.give_back(self.handover.leaving)
        self.handover.count(2 * index + 1, self._before + begin + len(sent))

    def _wait_for(self, turn: Turn, lane: int) -> None:
        """Wait until a micro-batch has been handed on, and its place is free; on a GPU no more than two are queued."""
        number = self._before + turn.begin + lane + 1
        if turn.number:
            self.handover.wait(2 * self._preceding(turn, lane), number)
        elif turn.begin:
            self.handover.wait(2 * (turn.slots - 1), number - self._a_round)
        if self._model.device.type == "cuda":
            self._computed.append(torch.cuda.current_stream(self._model.device).record_event())
            if len(self._computed) > 2:
                self._computed.popleft().synchronize()

    def _preceding(self, turn: Turn, lane: int) -> int:
        """Return the slot that hands a micro-batch on to a turn."""
        if turn.slot.kind == "head":
            return self._first_head - 1
        if turn.number == self._first_head + self._heads:
            return self._first_head + (turn.begin + lane) % self._heads
        return turn.number - 1

    def _forward(self, turn: Turn, lane: int, micro_batch: Sent, _: LoadedLayers) -> None:
        layers, (ids, position_ids) = turn.slot.layers, micro_batch[0]
        given = self._get(turn, lane, layers.start) if layers.start else [ids]
        with torch.no_grad():
            for layer in layers:
                if layer > layers.start and turn.batch.seed is not None:
                    self.handover.put(self._place(lane, layer), given)
                given = self._compute(turn, lane, layer, given, position_ids)
        self.handover.put(self._place(lane, layers.stop), given)

    def _backward(self, turn: Turn, lane: int, micro_batch: Sent, loaded: LoadedLayers) -> None:
        layers, (ids, position_ids) = turn.slot.layers, micro_batch[0]
        gradients = self._get(turn, lane, layers.stop)
        for layer in reversed(layers):
            inputs = [_leaf(each) for each in self._get(turn, lane, layer)] if layer else [ids]
            outputs = self._compute(turn, lane, layer, inputs, position_ids)
            torch.autograd.backward(outputs, gradients)
            loaded.take_gradients(layer, turn.begin + lane == 0, turn.batch.scale)
            gradients = _gradients(inputs)
        if layers.start:
            self.handover.put(self._place(lane, layers.start), gradients)

    def _both(self, turn: Turn, lane: int, micro_batch: Sent, loaded: LoadedLayers) -> Tensor:
        """Compute the loss, and the gradient of the head's input."""
        (_, position_ids), labels = micro_batch
        given = self._get(turn, lane, self._head)
        if turn.batch.seed is None:
            hidden, *sums = self._compute(turn, lane, self._head, given, position_ids)
            return self._model.loss((hidden, position_ids, *sums), labels)
        inputs = [_leaf(each) for each in given]
        hidden, *sums = self._compute(turn, lane, self._head, inputs, position_ids)
        loss = self._model.loss((hidden, position_ids, *sums), labels)
        (loss * turn.batch.scale / len(turn.batch.shapes)).backward()
        loaded.take_gradients(self._head, turn.begin + lane < self._heads, turn.batch.scale)
        self.handover.put(self._place(lane, self._head), _gradients(inputs))
        return loss.detach()

    def _compute(
        self, turn: Turn, lane: int, layer: int, given: Sequence[Tensor], position_ids: Tensor
    ) -> list[Tensor]:
        if turn.batch.seed is not None:
            drawn = numpy.random.SeedSequence([*turn.batch.seed, turn.begin + lane, layer]).generate_state(1)
            torch.manual_seed(int(drawn[0]))
        first, *others = given
        hidden, _, *sums = self._model.layer(layer)((first, position_ids, *others))
        return [hidden, *sums]

    def _get(self, turn: Turn, lane: int, layer: int) -> list[Tensor]:
        like = self._model.activations_like(*turn.batch.shapes[turn.begin + lane])
        return self.handover.get(self._place(lane, layer), like)

    def _place(self, lane: int, layer: int) -> int:
        """Return the place of a layer's input, and of its gradient."""
        return lane * self._head + layer - 1


class Turn(NamedTuple):
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

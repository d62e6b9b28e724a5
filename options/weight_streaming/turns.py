"""Compute the micro-batches of a step in turns: of n GPUs and S slots, turn p is slot p mod S on GPU p mod n.

The slots of a round are: a few layers forward each, then the head, forward and backward at once, then a few layers
backward each. A turn does one slot's work for all micro-batches of a round, one after the other, each as soon as the
previous slot has handed it on. The last slot of a round is followed by the first slot of the next round. A micro-batch
of the next round reuses the place of one that the last slot has finished.

A head that takes longer than the other slots is spread over h slots: slot k takes every h-th micro-batch from the k-th
on, and has sums of its own, which `HostEngine.sum_up` adds up.

A forward slot stores the input of each of its layers, and of each block the products that are kept. A backward slot
takes its layers one at a time, the last one first: forward again from what is stored, then backward. So a process holds
the activations of one layer, the weights of two slots, and nothing that grows with the number of layers.

The random generator is seeded by (seed, step, micro-batch, layer), and where in its rows a chunk begins. So
recomputation draws the same numbers as the forward pass, and no number depends on which process computes what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from options.weight_streaming.handover import Handover
from options.weight_streaming.row_passes import Batch, RowPasses
from options.weight_streaming.schedule import Slots, own_lanes
from options.weight_streaming.shared_memory import share_tensors
from options.weight_streaming.streamed_model import LoadedLayers, StreamedModel
from training.engine.trainer import Sent
from training.topology import layer_ranges

Passes = Literal["forward", "head", "backward"]


class TurnSlot(NamedTuple):
    """The layers and passes of a turn; `share` as in `options.weight_streaming.schedule.Slot`."""

    kind: Passes
    layers: range
    share: tuple[int, int] = (0, 1)


def slots_of(slots: Slots) -> list[TurnSlot]:
    """List the slots of a round in order."""
    forward, backward = (layer_ranges(layers) for layers in (slots.forward, slots.backward))
    head = forward[-1][1]
    return [
        *(TurnSlot("forward", range(*bounds)) for bounds in forward),
        *(TurnSlot("head", range(head, head + 1), (part, slots.heads)) for part in range(slots.heads)),
        *(TurnSlot("backward", range(*bounds)) for bounds in reversed(backward)),
    ]


class Turns:
    """Take this process's turns.

    Args:
        pool: the ranks that take turns, including this one.

    Attributes:
        handover: passes activations and counts between them.
        work: kind of slot -> function that computes a micro-batch from (turn, lane, micro-batch, weights).
    """

    def __init__(self, model: StreamedModel, slots: Slots, pool: Sequence[int]) -> None:
        self._model, self._slots, self._a_round = model, slots_of(slots), slots.a_round
        self._head, self._heads, self._first_head = model.spec.n_layers - 1, slots.heads, len(slots.forward)
        self._gpus, self._own = len(pool), pool.index(torch.distributed.get_rank())
        # Two counts a slot: micro-batches handed on, and micro-batches whose gradients are in the sums.
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
        """Compute a batch, and sum its gradients where it has a seed; return the mean loss of its micro-batches.

        A collective call of all pools. It returns when this pool has finished.
        """
        training, n_micro_batches = batch.seed is not None, len(batch.shapes)
        slots = self._slots
        if not training:  # one process has the head for all micro-batches, in their order
            slots = [*slots[: self._first_head], TurnSlot("head", slots[self._first_head].layers)]
        self.handover.inputs.make_room(self._a_round * self._head, batch.place)
        if batch.kept:
            self.handover.products.make_room(self._a_round * (self._head - 1), batch.kept)
        self._model.train(training)

        # The slots of all rounds go around among the processes; in an evaluation each round begins with the first.
        mine: list[tuple[int, int]] = []  # the first micro-batch of a round, and the slot
        for a_round, begin in enumerate(range(0, n_micro_batches, self._a_round)):
            before = a_round * len(slots) if training else 0
            mine += [(begin, slot) for slot in range(len(slots)) if (before + slot) % self._gpus == self._own]
        loaded = [
            LoadedLayers(self._model, slot.layers, self.handover.arriving, slot.share[0])
            for slot in (slots[index] for _, index in mine)
        ]

        sent_from, sent = -self._a_round, list[Sent]()  # the round that is read: its first micro-batch, and all of them
        with torch.set_grad_enabled(training):
            for place, (begin, index) in enumerate(mine):
                while sent_from < begin:
                    sent_from, sent = sent_from + self._a_round, list(islice(batch.micro_batches, self._a_round))
                self._take(
                    StreamedTurn(batch, slots[index], index, begin, len(slots)), sent, *loaded[place : place + 2]
                )
                loaded[place] = LoadedLayers(self._model, (), None)  # frees what it held
        deque(batch.micro_batches, maxlen=0)

        # All sums have all micro-batches once every slot says so.
        self._before += n_micro_batches
        for index in range(len(slots)):
            self.handover.wait(2 * index + 1, self._before)
        loss = float(self._total[: self._heads if training else 1].sum()) / n_micro_batches
        self.handover.meet()
        return loss

    def _take(
        self, turn: StreamedTurn, sent: Sequence[Sent], loaded: LoadedLayers, following: LoadedLayers | None = None
    ) -> None:
        """Take a turn, and fetch the weights of the following one meanwhile."""
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

    def _wait_for(self, turn: StreamedTurn, lane: int) -> None:
        """Wait until a micro-batch has been handed on and its place is free; on a GPU queue at most two."""
        number = self._before + turn.begin + lane + 1
        if turn.number:
            self.handover.wait(2 * self._preceding(turn, lane), number)
        elif turn.begin:
            self.handover.wait(2 * (turn.slots - 1), number - self._a_round)
        if self._model.device.type == "cuda":
            self._computed.append(torch.cuda.current_stream(self._model.device).record_event())
            if len(self._computed) > 2:
                self._computed.popleft().synchronize()

    def _preceding(self, turn: StreamedTurn, lane: int) -> int:
        """Return the slot that hands a micro-batch to a turn."""
        if turn.slot.kind == "head":
            return self._first_head - 1
        if turn.number == self._first_head + self._heads:
            return self._first_head + (turn.begin + lane) % self._heads
        return turn.number - 1

    def _forward(self, turn: StreamedTurn, lane: int, micro_batch: Sent, _: LoadedLayers) -> None:
        layers, passes = turn.slot.layers, self._passes(turn, lane, micro_batch)
        given = self._get(turn, lane, layers.start) if layers.start else [micro_batch[0][0]]
        for layer in layers:
            if layer > layers.start and turn.batch.seed is not None:
                self.handover.put(self._place(lane, layer), given)
            given = passes.forward(layer, given)
            if (products := self._model.take_products(layer)) and turn.batch.seed is not None:
                self.handover.put_products(self._place_of_products(lane, layer), products)
        self.handover.put(self._place(lane, layers.stop), given)

    def _backward(self, turn: StreamedTurn, lane: int, micro_batch: Sent, loaded: LoadedLayers) -> None:
        layers, passes, first = turn.slot.layers, self._passes(turn, lane, micro_batch), turn.begin + lane == 0
        gradients: Sequence[Tensor] = self._get(turn, lane, layers.stop)
        for layer in reversed(layers):
            given = self._get(turn, lane, layer) if layer else [micro_batch[0][0]]
            self._model.give_products(layer, self._get_products(turn, lane, layer))
            gradients = passes.backward(layer, given, gradients, loaded, first)
            self._model.take_products(layer)
        if layers.start:
            self.handover.put(self._place(lane, layers.start), gradients)

    def _both(self, turn: StreamedTurn, lane: int, micro_batch: Sent, loaded: LoadedLayers) -> Tensor:
        """Compute the loss and the gradient of the head's input."""
        given, first = self._get(turn, lane, self._head), turn.begin + lane < self._heads
        passes = self._passes(turn, lane, micro_batch)
        loss, gradients = passes.loss(self._head, given, micro_batch[1], loaded, first)
        if turn.batch.seed is not None:
            self.handover.put(self._place(lane, self._head), gradients)
        return loss

    def _passes(self, turn: StreamedTurn, lane: int, micro_batch: Sent) -> RowPasses:
        return RowPasses(self._model, turn.batch, turn.begin + lane, micro_batch[0][1])

    def _get(self, turn: StreamedTurn, lane: int, layer: int) -> list[Tensor]:
        like = self._model.activations_like(*turn.batch.shapes[turn.begin + lane])
        return self.handover.get(self._place(lane, layer), like)

    def _get_products(self, turn: StreamedTurn, lane: int, layer: int) -> list[Tensor]:
        like = self._model.products_like(layer, prod(turn.batch.shapes[turn.begin + lane]))
        return self.handover.get_products(self._place_of_products(lane, layer), like) if like else []

    def _place_of_products(self, lane: int, layer: int) -> int:
        return lane * (self._head - 1) + layer - 1  # the head has none

    def _place(self, lane: int, layer: int) -> int:
        """Return the place of a layer's input and later its gradient."""
        return lane * self._head + layer - 1


class StreamedTurn(NamedTuple):
    """A turn: slot `number` of `slots`, from micro-batch `begin` on."""

    batch: Batch
    slot: TurnSlot
    number: int
    begin: int
    slots: int

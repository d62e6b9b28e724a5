"""Simulate a step of weight streaming: the weights are in host memory, and the GPUs take turns at the layers.

A round is a list of S slots: a few layers forward each, the head, a few layers backward each. Of n GPUs, turn p is slot
p mod S on GPU p mod n, for the micro-batches of a round one after the other. The last slot of a round is followed by
the first slot of the next round, as weights do not change within a step. Several slots may share the head, each with a
part of the micro-batches. `options.weight_streaming.turns` runs the schedule.

A GPU has two buffers of weights. While it computes a turn, the weights of its next turn arrive, with the sums of their
gradients so far, in pieces between the micro-batches; the sums go back at the end of the turn. Activations go from slot
to slot through host memory. Each GPU has a link with the same bandwidth each way, which carries one transfer at a time.
The optimizer on the host begins when the last sums have arrived, as clipping needs the norm of all; the next step
begins when all weights are updated.

All transfers pass through host memory, so a step takes at least `moved` bytes over its bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training.topology import Division

WEIGHT_STREAMING = "weight_streaming"  # as the config names it


@dataclass(frozen=True)
class Slots:
    """What GPUs take turns at; the head has turns of its own, forward and backward.

    Attributes:
        forward, backward: layers of each turn, from the embedding to the last block.
        a_round: micro-batches that a turn computes.
        heads: turns that share the head, each with sums of its gradients; the number changes their last bits.
        kept: products of each block that stay in host memory until it is computed again (`products`).
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    a_round: int
    heads: int = 1
    kept: int = 0


@dataclass(frozen=True, kw_only=True)
class StreamedDivision(Division):
    """A run's layers by the process that loads and saves them, and the turns that compute them."""

    slots: Slots


@dataclass(frozen=True)
class Slot:
    """The cost of one turn; bytes are those that cross the GPU's link.

    Attributes:
        seconds: compute time of a micro-batch.
        begins: compute time before the first, once the weights are there.
        weights: bytes of weights, needed before the turn begins.
        sums: bytes of gradient sums, fetched in every round but the first, and sent back.
        enters, leaves: bytes of a micro-batch's activations, fetched before and sent after.
        update: seconds of the optimizer on the host for these layers; 0 in all but one of the slots that share them.
        share: (k, n): the slot has micro-batches k, k + n, k + 2 n and so on of a step, and n - 1 others the rest.
    """

    seconds: float
    weights: float = 0.0
    sums: float = 0.0
    enters: float = 0.0
    leaves: float = 0.0
    update: float = 0.0
    share: tuple[int, int] = (0, 1)
    begins: float = 0.0


@dataclass(frozen=True)
class Streamed:
    """A simulated step, from the start of one optimizer update to the start of the next.

    Attributes:
        seconds: duration.
        work: seconds of computation, summed over the GPUs.
        moved: bytes that crossed all links.
    """

    seconds: float
    work: float
    moved: float


def own_lanes(share: tuple[int, int], begin: int, end: int) -> range:
    """Return which micro-batches from `begin` to `end` a slot has (`Slot.share`), counted from `begin`."""
    part, parts = share
    return range((part - begin) % parts, end - begin, parts)


def simulate_turns(slots: Sequence[Slot], gpus: int, micro_batches: int, a_round: int, link: float) -> Streamed:
    """Simulate one step.

    Args:
        a_round: micro-batches of a round; divides `micro_batches`.
        link: bytes/s of a GPU's link, each way.

    Raises:
        ValueError: fewer slots than GPUs + 1, or rounds of unequal size.
    """
    if len(slots) <= gpus or micro_batches % a_round:
        raise ValueError(f"{len(slots)} slots, {gpus} GPUs, {micro_batches} micro-batches, {a_round} a round")

    turns = len(slots) * (micro_batches // a_round)
    updated = sum(slot.update for slot in slots)
    summed = [0.0] * len(slots)  # when a slot's sums are back on the host
    computed, came, left = ([0.0] * gpus for _ in range(3))  # until when the GPU and both ways of its link are busy
    loaded, released = [0.0] * gpus, [0.0] * gpus  # when this turn's weights are there, and the other buffer is free
    handed = [0.0] * a_round
    moved = 0.0
    for turn in range(turns):
        slot, gpu, following = slots[turn % len(slots)], turn % gpus, turn + gpus
        begin = turn // len(slots) * a_round
        lanes = own_lanes(slot.share, begin, begin + a_round)
        if turn < gpus:
            came[gpu] = loaded[gpu] = updated + slot.weights / link

        # The weights of the GPU's following turn come in pieces, between the inputs of this one's micro-batches.
        pieces, piece, allowed, most = 0, 0.0, 0.0, max(1, len(lanes))
        if following < turns:
            number = following % len(slots)
            again = following >= len(slots)  # in a later round
            pieces, allowed = most, max(released[gpu], summed[number] if again else updated)
            piece = (slots[number].weights + (slots[number].sums if again else 0.0)) / link / pieces
            moved += piece * link * pieces

        computed[gpu] = max(computed[gpu], loaded[gpu]) + slot.begins
        for done, lane in enumerate(lanes):
            while pieces and (
                max(came[gpu], allowed) < handed[lane] or (most - pieces < done and allowed <= came[gpu])
            ):
                came[gpu], pieces = max(came[gpu], allowed) + piece, pieces - 1
            came[gpu] = max(came[gpu], handed[lane]) + slot.enters / link
            computed[gpu] = max(computed[gpu], came[gpu]) + slot.seconds
            left[gpu] = max(left[gpu], computed[gpu]) + slot.leaves / link
            handed[lane] = left[gpu]

        if following < turns:
            came[gpu] = max(came[gpu], allowed) + pieces * piece if pieces else came[gpu]
        loaded[gpu] = came[gpu]
        left[gpu] += slot.sums / link
        summed[turn % len(slots)] = left[gpu]
        released[gpu] = left[gpu] if slot.sums else computed[gpu]
        moved += slot.sums + len(lanes) * (slot.enters + slot.leaves) + (slot.weights if turn < gpus else 0.0)
    rounds = micro_batches // a_round
    work = sum(len(own_lanes(slot.share, 0, micro_batches)) * slot.seconds + rounds * slot.begins for slot in slots)
    return Streamed(max(updated, *left, *computed), work, moved)

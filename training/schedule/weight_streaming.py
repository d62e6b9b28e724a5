"""Simulate a step of weight streaming: weights lie in host memory, and GPUs take turns at the layers.

A step is a list of S slots: a few layers forward, the head, a few layers backward. Turn p is slot p mod S on GPU
p mod n, for the micro-batches of a round one after the other; after a round's last slot comes the first one of the next
round, as weights do not change within a step. Several slots may share the head, by micro-batches.
`training.engine.turns` runs it.

A GPU has two buffers of weights. While it computes a turn, those of its next one arrive, and with them the sums of its
gradients so far, piece by piece between the micro-batches; the sums go back at the end. What a micro-batch hands from
slot to slot goes through host memory. Each GPU has a link, of the same bandwidth each way, that carries one thing after
another. The optimizer on the host begins when the last sums have come, as only then clipping knows the norm; the next
step begins when it has updated all.

Host memory carries all of it, so a step is never shorter than `moved` over its bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """What a GPU does in one turn; bytes cross its link.

    Attributes:
        seconds: for a micro-batch.
        weights: bytes that have to be there before.
        sums: bytes of its gradients' sums, which come, but for the first round, and go.
        enters, leaves: bytes of a micro-batch that come before and go after.
        update: seconds of the host for the weights of these layers, in one slot of those that have them.
        share: k of n: the slot has micro-batches k, k + n, k + 2 n and so on of a step, and n - 1 others the rest.
    """

    seconds: float
    weights: float = 0.0
    sums: float = 0.0
    enters: float = 0.0
    leaves: float = 0.0
    update: float = 0.0
    share: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Streamed:
    """A step, from the begin of the optimizer's work to that of the next one's.

    Attributes:
        work: seconds of all GPUs in which they compute.
        moved: bytes that crossed links.
    """

    seconds: float
    work: float
    gpus: int
    moved: float

    @property
    def bubble(self) -> float:
        """Share of the GPUs' time in which nothing is computed."""
        return 1 - self.work / (self.gpus * self.seconds)


def own_lanes(share: tuple[int, int], begin: int, end: int) -> range:
    """Return a slot's micro-batches (`Slot.share`) of `begin` to `end`, counted from `begin`."""
    part, parts = share
    return range((part - begin) % parts, end - begin, parts)


def simulate(slots: Sequence[Slot], gpus: int, micro_batches: int, a_round: int, link: float) -> Streamed:
    """Simulate one step.

    Args:
        a_round: micro-batches of a round; divides `micro_batches`.
        link: bytes/s of a GPU's link, each way.

    Raises:
        ValueError: no more slots than GPUs, or rounds of unequal size.
    """
    if len(slots) <= gpus or micro_batches % a_round:
        raise ValueError(f"{len(slots)} slots, {gpus} GPUs, {micro_batches} micro-batches, {a_round} a round")
    turns = len(slots) * (micro_batches // a_round)
    updated = sum(slot.update for slot in slots)
    summed = [0.0] * len(slots)  # when the host has a slot's sums
    computed, came, left = ([0.0] * gpus for _ in range(3))  # until when core and link are taken
    loaded, released = [0.0] * gpus, [0.0] * gpus  # weights of this turn are there; the turn before has given its back
    handed = [0.0] * a_round
    moved = 0.0
    for turn in range(turns):
        slot, gpu, following = slots[turn % len(slots)], turn % gpus, turn + gpus
        begin = turn // len(slots) * a_round
        lanes = own_lanes(slot.share, begin, begin + a_round)
        if turn < gpus:
            came[gpu] = loaded[gpu] = updated + slot.weights / link
        pieces, piece, allowed, most = 0, 0.0, 0.0, max(1, len(lanes))
        if following < turns:
            number = following % len(slots)
            again = following >= len(slots)  # a later round
            pieces, allowed = most, max(released[gpu], summed[number] if again else updated)
            piece = (slots[number].weights + (slots[number].sums if again else 0.0)) / link / pieces
            moved += piece * link * pieces
        for done, lane in enumerate(lanes):
            while pieces and (
                max(came[gpu], allowed) < handed[lane] or (most - pieces < done and allowed <= came[gpu])
            ):
                came[gpu], pieces = max(came[gpu], allowed) + piece, pieces - 1
            came[gpu] = max(came[gpu], handed[lane]) + slot.enters / link
            computed[gpu] = max(computed[gpu], came[gpu], loaded[gpu]) + slot.seconds
            left[gpu] = max(left[gpu], computed[gpu]) + slot.leaves / link
            handed[lane] = left[gpu]
        if following < turns:
            came[gpu] = max(came[gpu], allowed) + pieces * piece if pieces else came[gpu]
        loaded[gpu] = came[gpu]
        left[gpu] += slot.sums / link
        summed[turn % len(slots)] = left[gpu]
        released[gpu] = left[gpu] if slot.sums else computed[gpu]
        moved += slot.sums + len(lanes) * (slot.enters + slot.leaves) + (slot.weights if turn < gpus else 0.0)
    work = sum(len(own_lanes(slot.share, 0, micro_batches)) * slot.seconds for slot in slots)
    return Streamed(max(updated, *left, *computed), work, gpus, moved)

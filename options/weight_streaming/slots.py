"""What GPUs take turns at, as planner and engine hand it on."""

from __future__ import annotations

from dataclasses import dataclass

from training.topology import Division


@dataclass(frozen=True)
class Slots:
    """What GPUs take turns at; the head has turns of its own, forward and backward.

    Attributes:
        forward, backward: layers of each turn, from the embedding to the last block.
        a_round: micro-batches that a turn computes.
        heads: turns that share the head, each with sums of its gradients; the number changes their last bits.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    a_round: int
    heads: int = 1


@dataclass(frozen=True, kw_only=True)
class StreamedDivision(Division):
    """A run's layers by the process that loads and saves them, and the turns that compute them."""

    slots: Slots

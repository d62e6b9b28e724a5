"""Find the kind of work, the micro-batch and the stage of DeepSpeed's pipeline instructions.

An instruction names only its buffer. But for every kind of instruction a rank takes the micro-batches in an order that
is known, so they can be counted. The simulator reads schedules this way, the timeline a running engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

Schedule = Literal["1f1b", "dualpipev"]
Kind = Literal["forward", "backward", "weights", "head", "send", "receive", "exchange", "data", "optimizer"]
# A backward pass may leave the weights' gradients for later; where ranks take turns, the head has both passes at once.
WORK = ("forward", "backward", "weights", "head")

# The kind of each instruction; for a message also what is sent, and over which border: 0 behind the stage, -1 before.
_KINDS: dict[str, tuple[Kind, tuple[Literal["activation", "gradient"], int] | None]] = {
    "LoadMicroBatch": ("data", None),
    "ForwardPass": ("forward", None),
    "BackwardPass": ("backward", None),
    "WeightPass": ("weights", None),
    "SendActivation": ("send", ("activation", 0)),
    "RecvActivation": ("receive", ("activation", -1)),
    "SendGrad": ("send", ("gradient", -1)),
    "RecvGrad": ("receive", ("gradient", 0)),
    "ReduceTiedGrads": ("optimizer", None),
    "ReduceGrads": ("optimizer", None),
    "OptimizerStep": ("optimizer", None),
}
_BACKWARD = frozenset({"BackwardPass", "SendGrad", "RecvGrad"})
PASSES = frozenset(name for name, (kind, _) in _KINDS.items() if kind in WORK)
ON_ITS_OWN = PASSES | {"LoadMicroBatch"}  # need no other rank
JOINED = frozenset({"ForwardPass", "BackwardPass"})  # need the ranks that share layers or sequences, if any


class Transfer(NamedTuple):
    """An activation sent over the border behind a stage, or its gradient sent back."""

    kind: Literal["activation", "gradient"]
    stage: int  # before the border
    micro_batch: int
    ends: frozenset[int]  # the two ranks


class Meaning(NamedTuple):
    """What an instruction does, and for what.

    Attributes:
        stage: in the order of the layers; with dualpipev rank r of P holds stages r and 2P - 1 - r.
        micro_batch: from 0; None for the optimizer.
    """

    kind: Kind
    stage: int
    micro_batch: int | None
    message: Transfer | None


class InstructionReader:
    """Reads the instructions of one rank's step, in order.

    Attributes:
        backward_order: the micro-batches in the order of their backward passes; from 0 on where absent.
    """

    def __init__(self, rank: int, ranks: int, backward_order: Sequence[int] | None = None) -> None:
        self._rank, self._ranks, self.backward_order = rank, ranks, backward_order
        self._seen: Counter[tuple[str, int]] = Counter()

    def __call__(self, name: str, phase: int = 0) -> Meaning | None:
        """Return the meaning of the next instruction, given its class name; None if it only moves messages."""
        if name not in _KINDS:
            return None
        kind, message = _KINDS[name]
        stage = self._rank if phase == 0 else 2 * self._ranks - 1 - self._rank
        micro_batch = self._seen[name, phase]
        self._seen[name, phase] += 1
        if self.backward_order and name in _BACKWARD:
            micro_batch = self.backward_order[micro_batch]
        if message is None:
            return Meaning(kind, stage, None if kind == "optimizer" else micro_batch, None)
        sent, side = message
        border = stage + side
        ends = frozenset({self._owner(border), self._owner(border + 1)})
        return Meaning(kind, stage, micro_batch, Transfer(sent, border, micro_batch, ends))

    def _owner(self, stage: int) -> int:
        return min(stage, 2 * self._ranks - 1 - stage)


def backward_order_of(schedule: Any) -> Sequence[int] | None:
    """Return a schedule's own order of the backward passes; None where it is that of the forward passes."""
    order: Sequence[int] | None = getattr(schedule, "backward_order", None)
    return order


def read_schedule(schedule: Any) -> Iterator[tuple[Any, Meaning | None]]:
    """Yield the instructions of a DeepSpeed schedule (one rank's step) with their meanings."""
    read = InstructionReader(schedule.stage_id, schedule.stages, backward_order_of(schedule))
    for instructions in schedule.steps():
        for instruction in instructions:
            yield instruction, read(instruction.name, getattr(instruction, "phase", 0))

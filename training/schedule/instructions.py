"""What the instructions of DeepSpeed's pipeline schedules are about: which work, which micro-batch, which layers.

An instruction says only which buffer it uses. But each rank takes the micro-batches in order with every kind of
instruction, so counting tells the rest. The simulator reads a schedule so, the timeline a running engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Schedule = Literal["1f1b", "dualpipev"]
Kind = Literal["forward", "backward", "weights", "send", "receive", "exchange", "data", "optimizer"]
WORK = ("forward", "backward", "weights")  # what a step is for; a backward pass may leave the weights' part for later

# The kind of each instruction; of a message also what goes over which border: the one behind the stage or before it.
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
ON_ITS_OWN = frozenset(name for name, (kind, _) in _KINDS.items() if kind in (*WORK, "data"))  # needs no other rank
JOINED = frozenset({"ForwardPass", "BackwardPass"})  # of these, what needs those with whom layers or rows are shared

PASSES = frozenset(name for name, (kind, _) in _KINDS.items() if kind in WORK)


class Message(NamedTuple):
    """What crosses the border behind a stage: an activation forward, or its gradient back.

    Attributes:
        ends: the two ranks of the pipeline between which it goes.
    """

    kind: Literal["activation", "gradient"]
    stage: int
    micro_batch: int
    ends: frozenset[int]


class Meaning(NamedTuple):
    """What an instruction is about.

    Attributes:
        stage: which part of the layers, in their order; with dualpipev rank r of P holds r and 2P - 1 - r.
        micro_batch: from 0; None for what belongs to none.
    """

    kind: Kind
    stage: int
    micro_batch: int | None
    message: Message | None


class Reading:
    """Reads the instructions of one rank's step, in order.

    Args:
        rank: of the pipeline.
        ranks: how many the pipeline has.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._seen: Counter[tuple[str, int]] = Counter()

    def __call__(self, name: str, phase: int = 0) -> Meaning | None:
        """The meaning of the next instruction, by the name of its class; None for what only moves messages."""
        if name not in _KINDS:
            return None
        kind, message = _KINDS[name]
        stage = self._rank if phase == 0 else 2 * self._ranks - 1 - self._rank
        micro_batch = self._seen[name, phase]
        self._seen[name, phase] += 1
        if message is None:
            return Meaning(kind, stage, None if kind == "optimizer" else micro_batch, None)
        sent, side = message
        border = stage + side
        ends = frozenset({self._owner(border), self._owner(border + 1)})
        return Meaning(kind, stage, micro_batch, Message(sent, border, micro_batch, ends))

    def _owner(self, stage: int) -> int:
        return min(stage, 2 * self._ranks - 1 - stage)


def read_schedule(schedule: Any) -> Iterator[tuple[Any, Meaning | None]]:
    """The instructions of a DeepSpeed schedule, which is one rank's step, with their meanings."""
    read = Reading(schedule.stage_id, schedule.stages)
    for instructions in schedule.steps():
        for instruction in instructions:
            yield instruction, read(instruction.name, getattr(instruction, "phase", 0))

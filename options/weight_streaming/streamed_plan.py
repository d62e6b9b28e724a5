"""What a plan of weight streaming says of a step: its time, and the memory of a device and of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from common.quantities import counted, duration, gigabytes
from options.planner.costs import HOST
from options.planner.inputs import Basis
from options.weight_streaming.schedule import Slot, Slots, Streamed

ALIKE = 0.99  # of the time of a step, from which on plans count as equally fast
TOTAL_HOST = 8 * HOST  # bytes/s of a host's memory, as plans take it for eight processes


@dataclass(frozen=True)
class StreamedPlan:
    """A step with these slots.

    Attributes:
        turns: of a round.
        of_device: most bytes of a GPU, by what holds them.
        of_host: bytes of main memory, likewise.
    """

    basis: Basis
    gpus: int
    slots: Slots
    turns: Sequence[Slot]
    step: Streamed
    of_device: Mapping[str, int]
    of_host: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Return the time of a step; main memory carries all that crosses links."""
        return max(self.step.seconds, self.step.moved / TOTAL_HOST)

    @property
    def peak(self) -> int:
        return sum(self.of_device.values())

    @property
    def host(self) -> int:
        return sum(self.of_host.values())

    @property
    def fits(self) -> bool:
        return self.fits_device and (self.basis.main_memory is None or self.host <= self.basis.main_memory)

    @property
    def fits_device(self) -> bool:
        return not self.basis.device.memory or self.peak <= self.basis.device.memory

    @property
    def bubble(self) -> float:
        return 1 - self.step.work / (self.gpus * self.seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.basis.workload.tokens / self.seconds

    def describe(self) -> list[str]:
        """Say in lines what a step takes."""
        device, known = self.basis.device, []
        if device.known:
            known = [f"{duration(self.seconds)} a step, {self.tokens_per_s:,.0f} tokens/s"]
        limit = f" of {gigabytes(device.memory)}" if device.memory else ""
        memory = f"at most {gigabytes(self.peak)}{limit} on a device, {gigabytes(self.host)} of main memory"
        line = f"weight streaming: {', '.join([*known, f'bubble {self.bubble:.1%}', memory])}"
        unknown = "kept of a block: its input alone, as the host's memory is not known; --host-memory names it"
        return [line, *describe_turns(self.slots), *([unknown] if self.basis.main_memory is None else [])]

    def draw(self, path: Path) -> Path:
        """Draw memory by part, and the time of each turn, as a PNG."""
        from options.weight_streaming.drawing import draw_streamed

        return draw_streamed(self, path)


def least(plans: Sequence[StreamedPlan]) -> StreamedPlan | None:
    """Return, of the fastest plans, the one that takes the least memory of the host."""
    within = min((plan.seconds for plan in plans), default=0.0) / ALIKE
    return min((plan for plan in plans if plan.seconds <= within), key=attrgetter("host"), default=None)


def describe_turns(slots: Slots) -> list[str]:
    """Say, in a line for the log, how many layers a turn has."""
    forward, backward = map(_turns_of, (slots.forward, slots.backward))
    kept = f" but for {counted(slots.kept, 'product')} of each block, kept in host memory" if slots.kept else ""
    again = f"all recompute{kept}"
    micro_batches, head = counted(slots.a_round, "micro-batch"), counted(slots.heads, "turn")
    return [f"turns: {micro_batches} through {forward} forward, {head} of the head, {backward} backward; {again}"]


def _turns_of(layers: Sequence[int]) -> str:
    fewest, most = min(layers), max(layers)
    sizes = counted(most, "layer") if fewest == most else f"{fewest} to {most} layers"
    return f"{counted(len(layers), 'turn')} of {sizes}"

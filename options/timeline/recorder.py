"""Record the spans of one rank's step: what the engine did, and when.

The engine's instruction handlers are wrapped for one step and restored after it, so other steps are not affected. On a
CPU two clock readings frame an instruction. On a GPU, where instructions only queue work, two CUDA events do, read
after the step. A send or receive includes the wait for the other rank; `options.timeline.session` separates them once
all ranks' records are together. Cost: some 10 microseconds per instruction, and on a GPU a synchronization per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from options.planner.feedback import cuda_mark
from training.schedule.instructions import InstructionReader, Kind, Meaning, Transfer, backward_order_of
from training.schedule.walk import TimeSpan

# Pipeline instruction -> method of an engine without a pipeline that does the same.
METHODS = {"ForwardPass": "forward", "BackwardPass": "backward", "OptimizerStep": "step"}


class Record(NamedTuple):
    """A span and the messages that it waited for.

    Attributes:
        posted: when this rank started the messages, maybe before the span.
    """

    span: TimeSpan
    messages: tuple[Transfer, ...]
    posted: float


@runtime_checkable
class TakesTurns(Protocol):
    """An engine without instructions.

    Attributes:
        turn_work: kind of turn -> what computes a micro-batch, given the turn (with its `number`, and the micro-batch
            at which it began), the micro-batch's number in it, and more; the engine looks it up for each.
    """

    turn_work: dict[Kind, Callable[..., Any]]


class CallReader(InstructionReader):
    """Reads the calls of an engine without a pipeline, which goes back from what it has passed forward last."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._passed: list[int | None] = []

    def __call__(self, name: str, phase: int = 0) -> Meaning | None:
        meaning = super().__call__(name, phase)
        if meaning and meaning.kind == "forward":
            self._passed.append(meaning.micro_batch)
        elif meaning and meaning.kind == "backward":
            meaning = meaning._replace(micro_batch=self._passed.pop())
        return meaning


class Recorder:
    """Records the spans of one rank.

    A mark is a moment: on a CPU the value of `time.perf_counter`, on a GPU an event, which the step's first
    event ties to that clock.

    Args:
        offset: seconds by which this process's `time.perf_counter` is ahead of the common time.

    Attributes:
        unit: what passes through the stages at once, in a word.
    """

    def __init__(self, rank: int, device: torch.device, offset: float) -> None:
        self._rank, self._offset = rank, offset
        self._on_gpu = device.type == "cuda"
        self.unit = "micro-batch"

    @contextmanager
    def step(self, engine: DeepSpeedEngine | TakesTurns) -> Iterator[list[Record]]:
        """Record what the engine does in the block; fill the list, in common time, at its end."""
        records: list[Record] = []
        self._noted: list[tuple[Meaning, tuple[Transfer, ...], Any, Any, Any]] = []
        self._queued: list[Meaning] = []  # messages not waited for yet
        self._launched: Any = None  # mark of their start, if that was before the wait
        place: dict[Any, Any] = vars(engine)  # of what is wrapped
        wrapped: dict[Any, Any]
        if isinstance(engine, TakesTurns):
            place = engine.turn_work
            wrapped = {kind: self._wrap_turn(kind, do) for kind, do in place.items()}
        elif isinstance(engine, PipelineEngine):
            self._read = InstructionReader(engine.stage_id, engine.num_stages)
            instructions = {kind: self._wrap(kind.__name__, do) for kind, do in engine._INSTRUCTION_MAP.items()}
            self._batched = any(kind.__name__ == "CommitP2P" for kind in instructions)
            wrapped = {"_INSTRUCTION_MAP": instructions, "_train_schedule": self._wrap_schedule(engine._train_schedule)}
        else:
            self._read, self._batched = CallReader(), False
            wrapped = {method: self._wrap(name, getattr(engine, method)) for name, method in METHODS.items()}
        original = {name: place.get(name) or getattr(engine, name) for name in wrapped}
        place.update(wrapped)
        if self._on_gpu:
            torch.cuda.synchronize()
            self._first, self._began = self._mark(), time.perf_counter()
        try:
            yield records
        finally:
            place.update(original)
        for (kind, stage, micro_batch, _), messages, *marks in self._noted:
            posted, begin, end = map(self._seconds, marks)
            records.append(Record(TimeSpan(self._rank, kind, micro_batch, begin, end, stage), messages, posted))

    def _wrap_schedule(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap what makes the schedule of a step, once its micro-batches are known, to read it in its order."""

        def made() -> Any:
            schedule = make()
            self._read.backward_order = backward_order_of(schedule)
            self.unit = getattr(schedule, "unit", "micro-batch")
            return schedule

        return made

    def _wrap_turn(self, kind: Kind, execute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what computes a turn's micro-batches; the turns of a round are its stages."""

        def run(turn: Any, lane: int, *arguments: Any) -> Any:
            begin = self._mark()
            result = execute(turn, lane, *arguments)
            meaning = Meaning(kind, turn.number, turn.begin + lane, None)
            self._noted.append((meaning, (), begin, begin, self._mark()))
            return result

        return run

    def _wrap(self, name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an instruction's handler to record its span, if it has one."""

        def run(*arguments: Any, **named: Any) -> Any:
            meaning = self._read(name, named.get("phase", 0))
            messages: tuple[Transfer, ...] = (meaning.message,) if meaning and meaning.message else ()
            posted = None
            if meaning and messages and self._batched:  # CommitP2P waits for all that were queued before it
                self._queued.append(meaning)
                meaning = None  # recorded with the wait
            elif name == "LaunchP2P":
                self._launched = self._mark()
            elif name == "CommitP2P" and self._queued:
                kinds = {each.kind for each in self._queued}
                messages = tuple(each.message for each in self._queued if each.message)
                meaning = self._queued[0]._replace(kind=kinds.pop() if len(kinds) == 1 else "exchange")
                posted, self._launched, self._queued = self._launched, None, []
            if meaning is None:
                return execute(*arguments, **named)
            begin = self._mark()
            result = execute(*arguments, **named)
            self._noted.append((meaning, messages, posted or begin, begin, self._mark()))
            return result

        return run

    def _mark(self) -> Any:
        return cuda_mark() if self._on_gpu else time.perf_counter()

    def _seconds(self, mark: Any) -> float:
        """Convert a mark to common time; on a GPU, wait for the work before it."""
        if self._on_gpu:
            mark.synchronize()
            mark = self._began + self._first.elapsed_time(mark) / 1000
        return float(mark) - self._offset

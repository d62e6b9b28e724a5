"""One rank's spans of a step: what the engine did, from when to when.

What the engine calls for each instruction is wrapped for the length of a step and put back after it; steps that are not
recorded run the engine as it is. On a CPU two readings of a clock frame an instruction. On a GPU, where instructions
only queue work, two CUDA events do: they are read when the step is over, so nothing waits inside of it. A send or
receive spans the waiting for the other side too; who waited for whom shows when all ranks are seen together
(`training.profiler.figures`). An instruction takes some 10 microseconds more, and on a GPU a step begins with a
synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from training.plan.feedback import cuda_mark
from training.schedule.instructions import Meaning, Message, Reading
from training.schedule.walk import Span

# The methods of an engine without a pipeline, by the instructions of one that do the same.
METHODS = {"ForwardPass": "forward", "BackwardPass": "backward", "OptimizerStep": "step"}


class Record(NamedTuple):
    """A span and the messages that it waited for.

    Attributes:
        posted: when this rank started them; before the span where it did something else meanwhile.
    """

    span: Span
    messages: tuple[Message, ...]
    posted: float


class Recorder:
    """Notes the spans of one rank.

    A mark is a moment of its work: on a CPU the time itself, by `time.perf_counter`; on a GPU an event in its queue,
    tied to that clock by the first one of the step.

    Args:
        rank: among all processes.
        device: that its engine works on.
        offset: what its `time.perf_counter` is ahead of the common time.
    """

    def __init__(self, rank: int, device: torch.device, offset: float) -> None:
        self._rank = rank
        self._on_gpu = device.type == "cuda"
        self._offset = offset

    @contextmanager
    def step(self, engine: DeepSpeedEngine) -> Iterator[list[Record]]:
        """Record what the engine does in the block; the list is filled, in common time, when that is over."""
        records: list[Record] = []
        self._noted: list[tuple[Meaning, tuple[Message, ...], Any, Any, Any]] = []
        self._queued: list[Meaning] = []  # messages that were handed over and not waited for yet
        self._launched: Any = None  # the mark of when they were started, where that was before the waiting
        if isinstance(engine, PipelineEngine):
            self._read = Reading(engine.stage_id, engine.num_stages)
            instructions = {kind: self._watched(kind.__name__, do) for kind, do in engine._INSTRUCTION_MAP.items()}
            self._batched = any(kind.__name__ == "CommitP2P" for kind in instructions)
            watched: dict[str, Any] = {"_INSTRUCTION_MAP": instructions}
        else:
            self._read, self._batched = Reading(0, 1), False
            watched = {method: self._watched(name, getattr(engine, method)) for name, method in METHODS.items()}
        unwatched = {attribute: getattr(engine, attribute) for attribute in watched}
        vars(engine).update(watched)
        if self._on_gpu:
            torch.cuda.synchronize()
            self._first, self._began = self._mark(), time.perf_counter()
        try:
            yield records
        finally:
            vars(engine).update(unwatched)
        for (kind, stage, micro_batch, _), messages, *marks in self._noted:
            posted, begin, end = map(self._seconds, marks)
            records.append(Record(Span(self._rank, kind, micro_batch, begin, end, stage), messages, posted))

    def _watched(self, name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        """An instruction's call that notes its span, if it has one."""

        def run(*arguments: Any, **named: Any) -> Any:
            meaning = self._read(name, named.get("phase", 0))
            messages: tuple[Message, ...] = (meaning.message,) if meaning and meaning.message else ()
            posted = None
            if meaning and messages and self._batched:  # CommitP2P waits for all that were queued before it
                self._queued.append(meaning)
                meaning = None
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
        """This moment."""
        return cuda_mark() if self._on_gpu else time.perf_counter()

    def _seconds(self, mark: Any) -> float:
        """When it was, in common time; on a GPU this waits for the work before it."""
        if self._on_gpu:
            mark.synchronize()
            mark = self._began + self._first.elapsed_time(mark) / 1000
        return float(mark) - self._offset

"""One rank's spans of a step: what the engine did, from when to when.

The engine's instructions are wrapped for the length of a step and put back after it; steps that are not recorded run
the engine as it is. On a CPU two readings of a clock frame an instruction. On a GPU, where instructions only queue
work, two CUDA events do: they are read when the step is over, so nothing waits inside of it. A send or receive spans
the waiting for the other side too; who waited for whom shows when all ranks are seen together
(`training.profiler.waiting`). An instruction takes some 10 microseconds more, and on a GPU a step begins with a
synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import CommitP2P

from training.schedule.instructions import Message, Reading
from training.schedule.simulation import Span

Execute = Callable[..., Any]


class Record(NamedTuple):
    """A span and the messages that it waited for.

    Attributes:
        posted: when this rank started them; before the span where it did something else meanwhile.
    """

    span: Span
    messages: tuple[Message, ...]
    posted: float


class Clock(Protocol):
    """Takes marks during a step, and says afterwards when they were."""

    def start(self) -> None:
        """A step begins."""

    def mark(self) -> Any:
        """This moment of the rank's work."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When the marks of the step were, on this machine's `time.perf_counter`."""


class HostClock:
    """The clock of the process, which on a CPU does the work itself."""

    def start(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class DeviceClock:
    """Events in the queue of a GPU, tied to the process's clock by the step's first one."""

    def start(self) -> None:
        torch.cuda.synchronize()
        self._first = self.mark()
        self._began = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        torch.cuda.synchronize()
        return [self._began + self._first.elapsed_time(event) / 1000 for event in marks]


class Recorder:
    """Notes the spans of one rank.

    Args:
        rank: among all processes.
        clock: of this rank's work.
        offset: what its `time.perf_counter` is ahead of the common time.
    """

    def __init__(self, rank: int, clock: Clock, offset: float) -> None:
        self._rank = rank
        self._clock = clock
        self._offset = offset
        self._open: list[tuple[str, int | None, int, tuple[Message, ...], Any, Any, Any]] = []

    @contextmanager
    def step(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Record what the engine does in the block."""
        self._open = []
        self._clock.start()
        watch = _watch_pipeline if isinstance(engine, PipelineEngine) else _watch_engine
        with watch(engine, self):
            yield

    def mark(self) -> Any:
        """This moment, for `span`."""
        return self._clock.mark()

    @contextmanager
    def span(
        self,
        kind: str,
        micro_batch: int | None,
        stage: int = 0,
        messages: tuple[Message, ...] = (),
        posted: Any = None,
    ) -> Iterator[None]:
        """Note the block as one span.

        Args:
            posted: the mark of when the messages were started, where that was not in the block.
        """
        begin = self._clock.mark()
        yield
        marks = begin if posted is None else posted, begin, self._clock.mark()
        self._open.append((kind, micro_batch, stage, messages, *marks))

    def take(self) -> list[Record]:
        """The spans of the step, which is over, in common time."""
        marks = [mark for noted in self._open for mark in noted[-3:]]
        times = [seconds - self._offset for seconds in self._clock.seconds(marks)]
        spans = zip(self._open, times[::3], times[1::3], times[2::3], strict=True)
        return [
            Record(Span(self._rank, kind, micro_batch, begin, end, stage), messages, posted)
            for (kind, micro_batch, stage, messages, *_), posted, begin, end in spans
        ]


@contextmanager
def _watch_pipeline(engine: PipelineEngine, recorder: Recorder) -> Iterator[None]:
    """Note each instruction of the schedule."""
    unwatched = engine._INSTRUCTION_MAP
    read = Reading(engine.stage_id, engine.num_stages)
    together = CommitP2P in unwatched  # DualPipeV's messages are queued, and start with this instruction
    queued: list[tuple[str, Message]] = []
    launched: list[Any] = []

    def watched(name: str, execute: Execute) -> Execute:
        def run(engine: PipelineEngine, **arguments: Any) -> None:
            meaning = read(name, arguments.get("phase", 0))
            if meaning is None and (name != CommitP2P.__name__ or not queued):
                if queued:
                    launched.append(recorder.mark())
                return execute(engine, **arguments)
            if meaning is None:
                kinds, messages = {kind for kind, _ in queued}, tuple(message for _, message in queued)
                kind, posted = kinds.pop() if len(kinds) == 1 else "exchange", launched[-1] if launched else None
                queued.clear()
                launched.clear()
                with recorder.span(kind, None, engine.stage_id, messages, posted):
                    return execute(engine, **arguments)
            if meaning.message and together:
                queued.append((meaning.kind, meaning.message))
                return execute(engine, **arguments)
            messages = (meaning.message,) if meaning.message else ()
            with recorder.span(meaning.kind, meaning.micro_batch, meaning.stage, messages):
                return execute(engine, **arguments)

        return run

    engine._INSTRUCTION_MAP = {kind: watched(kind.__name__, execute) for kind, execute in unwatched.items()}
    try:
        yield
    finally:
        engine._INSTRUCTION_MAP = unwatched


@contextmanager
def _watch_engine(engine: DeepSpeedEngine, recorder: Recorder) -> Iterator[None]:
    """Note each forward and backward pass and the optimizer of an engine without a pipeline."""
    kinds = {"forward": "forward", "backward": "backward", "step": "optimizer"}
    unwatched = {name: getattr(engine, name) for name in kinds}

    def watched(kind: str, execute: Execute) -> Execute:
        done = 0

        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            with recorder.span(kind, None if kind == "optimizer" else done):
                done += 1
                return execute(*arguments, **named)

        return run

    for name, execute in unwatched.items():
        setattr(engine, name, watched(kinds[name], execute))
    try:
        yield
    finally:
        for name, execute in unwatched.items():
            setattr(engine, name, execute)

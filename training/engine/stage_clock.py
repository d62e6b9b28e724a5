"""How long a stage works in a step, without its waiting for other stages: what a plan is held against.

In a step that is measured two marks frame each pass, forward, backward or for the gradients of weights. On a GPU they
are events in its queue, which are read once the step's loss has come, and with it all that was queued before: nobody
waits for one. On a CPU they read the processor time of the thread that works, as the clock also tells what others on
the machine take from it. Cost: some 10 microseconds a pass; steps that are not measured run the engine as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from training.schedule.instructions import PASSES


class StageClock:
    """`with clock.step(engine, micro_batches): ...` around each step to measure.

    Attributes:
        seconds: for one micro-batch, of each of the steps.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def step(self, engine: PipelineEngine, micro_batches: int) -> Iterator[None]:
        """Measure what the engine does in the block, which ends when the step's loss is known."""
        self._mark = _event if engine.device.type == "cuda" else time.thread_time
        self._marks: list[tuple[Any, Any]] = []
        instructions = engine._INSTRUCTION_MAP
        engine._INSTRUCTION_MAP = {
            kind: self._framed(execute) if kind.__name__ in PASSES else execute
            for kind, execute in instructions.items()
        }
        try:
            yield
        finally:
            engine._INSTRUCTION_MAP = instructions
        spans = (
            begin.elapsed_time(end) / 1000 if isinstance(begin, torch.cuda.Event) else end - begin
            for begin, end in self._marks
        )
        self.seconds.append(sum(spans) / micro_batches)
        self._marks = []

    def _framed(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = self._mark()
            result = execute(*arguments, **named)
            self._marks.append((begin, self._mark()))
            return result

        return run


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

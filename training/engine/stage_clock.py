"""Measure how long a stage works in a step, without waiting for other stages, to compare it with the plan.

Two marks frame each pass: forward, backward, or weight gradients. On a GPU they are CUDA events, read after the step's
loss is known, so nothing waits for them. On a CPU they read the thread's processor time, as wall time includes what
other processes on the machine take. Cost: some 10 microseconds per pass, in measured steps only.
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
    """Measures steps: `with clock.step(engine, micro_batches): ...`.

    Attributes:
        seconds: per micro-batch, for each measured step.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def step(self, engine: PipelineEngine, micro_batches: int) -> Iterator[None]:
        """Measure the passes in the block, which must end after the step's loss is known."""
        mark = cuda_mark if engine.device.type == "cuda" else time.thread_time
        spans: list[tuple[Any, Any]] = []

        def framed(execute: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> None:
                begin = mark()
                execute(*arguments, **named)
                spans.append((begin, mark()))

            return run

        plain = engine._INSTRUCTION_MAP
        passes = {kind: framed(execute) for kind, execute in plain.items() if kind.__name__ in PASSES}
        engine._INSTRUCTION_MAP = plain | passes
        try:
            yield
        finally:
            engine._INSTRUCTION_MAP = plain
        on_gpu = mark is cuda_mark
        seconds = sum(begin.elapsed_time(end) / 1000 if on_gpu else end - begin for begin, end in spans)
        self.seconds.append(seconds / micro_batches)


def cuda_mark() -> torch.cuda.Event:
    """Record an event behind the work that is queued on the device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

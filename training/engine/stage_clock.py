"""How long a stage works in a step, without its waiting for other stages: what a plan is held against.

Two marks frame each pass, forward, backward or for the gradients of weights. On a GPU they are events in its queue,
read once the step's loss has come, and with it all that was queued before: nobody waits for one. On a CPU they read the
processor time of the thread that works, as the clock also tells what others on the machine take from it. Cost: some 10
microseconds a pass, in steps that are measured.
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
    """When the work that the device has by now is done."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

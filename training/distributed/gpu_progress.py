"""Record how far this process's GPU is in the schedule, to find the rank at fault in a hang.

Under NCCL a waiting rank does not show in Python's stack: its GPU waits in one of NCCL's kernels, and its host for the
next result. So each instruction puts an event into the GPU's queue. The first pending event names the instruction that
the GPU executes: a computation of its own, or a message or sum with others. If ranks share layers or rows, forward and
backward passes contain such sums too.

Cost: some 2 microseconds per instruction, without waiting. Does nothing on a CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from training.schedule.instructions import JOINED, ON_ITS_OWN

Execute = Callable[..., Any]

_queue: deque[tuple[str, torch.cuda.Event]] = deque()  # in the order of the GPU's queue; finished ones leave it
_under_way: list[str] = []  # the instruction that the host is executing, if any
_joined: set[str] = set()  # instructions that contain sums with the ranks that share layers or rows


def followed(instructions: Mapping[type, Execute], shared: bool = False) -> dict[type, Execute]:
    """Add an event after each kind of instruction of an engine.

    Args:
        shared: whether other processes share the layers or rows.
    """
    _joined.clear()
    _joined.update(JOINED if shared else ())
    return {kind: _followed(kind.__name__, execute) for kind, execute in instructions.items()}


def current_instruction() -> str | None:
    """Return the name of the first instruction that the GPU has not finished; None after the last one of a step."""
    return next((name for name, event in list(_queue) if not event.query()), next(iter(_under_way), None))


def needs_no_other_rank(name: str | None) -> bool:
    """Return whether an instruction is a computation of this rank alone, which the others wait for."""
    return name in ON_ITS_OWN - _joined


def _followed(name: str, execute: Execute) -> Execute:
    @wraps(execute)
    def run(*args: Any, **kwargs: Any) -> Any:
        _under_way.append(name)
        try:
            result = execute(*args, **kwargs)
        finally:
            _under_way.pop()
        if torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
            _queue.append((name, event))
            while _queue and _queue[0][1].query():
                _queue.popleft()
        return result

    return run

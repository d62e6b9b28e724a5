"""How far this process's GPU has come in the schedule, for the moment when nothing moves any more.

Under NCCL nobody sees in Python that a rank waits for another: its GPU does, in one of NCCL's kernels, and its host in
whatever needs a number first. So an event follows each instruction into the GPU's queue. The first one that did not
come to pass names the instruction in which the GPU stands: its own computation, or a message or sum with others. Where
ranks share layers or rows, the passes too hold such sums, so that a GPU in one of them may wait for another's.

Cost: an event an instruction, some 2 microseconds; nobody waits for one. On a CPU there is nothing to follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from training.schedule.instructions import JOINED, ON_ITS_OWN

Execute = Callable[..., Any]

_given: deque[tuple[str, torch.cuda.Event]] = deque()  # in the order of the queue; what is done leaves it
_under_way: list[str] = []  # what the host is giving at the moment, if anything
_joined: set[str] = set()  # instructions in which this process exchanges numbers with those that it shares layers with


def followed(instructions: Mapping[type, Execute], shared: bool = False) -> dict[type, Execute]:
    """What an engine calls for each kind of instruction, with an event after it.

    Args:
        shared: whether layers or rows are shared with other processes.
    """
    _joined.clear()
    _joined.update(JOINED if shared else ())
    return {kind: _followed(kind.__name__, execute) for kind, execute in instructions.items()}


def standing() -> str | None:
    """The name of the first instruction that the GPU has not come to the end of; None behind the last of a step."""
    return next((name for name, event in list(_given) if not event.query()), next(iter(_under_way), None))


def on_its_own(name: str | None) -> bool:
    """Whether an instruction needs no other rank, so that a GPU that stands in it holds up the others."""
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
            _given.append((name, event))
            while _given and _given[0][1].query():
                _given.popleft()
        return result

    return run

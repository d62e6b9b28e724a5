"""Know which process of a run this is, and let all of them agree.

Every launcher (deepspeed, torchrun, srun) says in the environment which process this is. An entry point that finds
nothing there starts the processes itself (`training.launch.start`).
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from training.errors import USER_ERRORS, RunRefused, describe_and_save
from training.launch import slurm

LAUNCHER_GONE = signal.SIGRTMIN  # a process sends it to itself; one that does not handle it ends at once

Value = TypeVar("Value")


@dataclass(frozen=True)
class ProcessInfo:
    """Rank of this process in the run and on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls) -> ProcessInfo | None:
        """Read what the launcher says; return None if no launcher started this process."""
        environment = os.environ
        slurm.set_environment()
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        world_size = int(environment["WORLD_SIZE"])
        local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size
        return cls(int(environment["RANK"]), world_size, int(environment.get("LOCAL_RANK", 0)), int(local_size))


def gather(value: Value) -> list[Value]:
    """Return every rank's value, by rank; all ranks call it together."""
    import torch

    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def from_first(make: Callable[[], Value]) -> Value:
    """Return what rank 0 makes, on all ranks, which call it together."""
    import torch

    made: list[Any] = [None]
    with agreed():
        if torch.distributed.get_rank() == 0:
            made = [make()]
    torch.distributed.broadcast_object_list(made)
    result: Value = made[0]
    return result


@contextmanager
def agreed() -> Iterator[None]:
    """Do something that may fail on some ranks, without communication inside; all ranks call it together.

    Raises:
        RunRefused: on every rank, with the error of the lowest rank that failed, so that none waits for one that left;
            with its host, if it did not fail on another one.
    """
    failure: str | None = None
    try:
        yield
    except USER_ERRORS as error:
        failure = describe_and_save(error)[1]
    outcomes = gather((socket.gethostname(), failure))
    for host, text in outcomes:
        if text is not None:
            only_here = any(other != host and failed is None for other, failed in outcomes)
            raise RunRefused(*(f"host {host}: {text}" if only_here else text).split("\n"))

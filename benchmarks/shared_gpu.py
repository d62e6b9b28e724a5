"""Run several ranks on one GPU, so that a pipeline can be tested where there is only one.

NCCL refuses two ranks on one device, and gloo (torch 2.11) sends and receives no CUDA tensors. So gloo carries every
message through a copy in host memory. This tests schedules, streams and kernels against one process; it says nothing
about NCCL's order or deadlocks, or about speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed


class _Arriving:
    """A message on its way into a tensor on the GPU: `wait` copies it there."""

    def __init__(self, work: Any, host: Tensor, tensor: Tensor) -> None:
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self, *_: Any) -> bool:
        self._work.wait()
        self._tensor.detach().copy_(self._host)  # it may require a gradient by now
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def install() -> None:
    """Let this process's collectives and messages go through the host. Call it before the process group is made."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator()._communication_backend_name = "gloo"
    for name in ("all_reduce", "broadcast", "send", "recv"):
        setattr(distributed, name, _through_host(getattr(distributed, name)))
    real_isend, real_irecv = distributed.isend, distributed.irecv

    def isend(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        return real_isend(tensor.detach().cpu(), *arguments, **options)

    def irecv(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        host = torch.empty_like(tensor.detach(), device="cpu")
        return _Arriving(real_irecv(host, *arguments, **options), host, tensor)

    def batch_isend_irecv(operations: Sequence[distributed.P2POp]) -> list[Any]:
        return [
            isend(each.tensor, group=each.group, group_dst=each.group_peer)
            if each.op is real_isend
            else irecv(each.tensor, group=each.group, group_src=each.group_peer)
            for each in operations
        ]

    setattr(distributed, "batch_isend_irecv", batch_isend_irecv)  # noqa: B010  # of other types, for mypy


def _through_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a collective a copy of its tensor in host memory, and copy the result back."""

    def call(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        host = tensor.detach().cpu() if tensor.is_cuda else tensor.detach().clone()
        options.pop("async_op", None)  # whoever waits for the result finds it there
        found = function(host, *arguments, **options)
        tensor.detach().copy_(host)
        return found

    return call


def run_shared(ranks: int, words: Sequence[str]) -> int:
    """Run this module's command line `words` as ranks of one run on the same GPU; the first exit code that is not 0."""
    from training.launch.agent import free_port

    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}  # all take the first GPU
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen([sys.executable, *words], env=os.environ | shared | {"RANK": str(rank)})
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in processes]
    return next(filter(None, codes), 0)

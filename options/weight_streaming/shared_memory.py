"""Share host memory between processes of one host, for as long as one of them lives.

A memory file (memfd_create) has no name in any file system, so the kernel frees it with the last process that has it,
whatever way they end. One process makes it, and the others open it through /proc. It takes memory where it is written.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence
from mmap import mmap

import torch
from torch import Tensor

from training.distributed.processes import agreed, gather
from training.engine.host_sums import lock_pages
from training.errors import ConfigError

ALIGNED = 64  # bytes: a cache line


def share_memory(size: int, pool: Sequence[int], device: torch.device) -> mmap:
    """Make memory of `size` bytes that the ranks of a pool share; all ranks of the run call it together.

    Args:
        pool: ranks on one host, the same list on each of them; the first one makes the memory.
        device: reads and writes it by itself, where it is a GPU.

    Raises:
        RunRefused: on every rank, where a pool's ranks are on several hosts.
    """
    first, descriptor = torch.distributed.get_rank() == pool[0], -1
    if first:
        descriptor = os.memfd_create("weights")
        os.ftruncate(descriptor, size)

    # The first process makes it; the others open it by the number that it has there.
    made = gather((socket.gethostname(), os.getpid(), descriptor))
    host, process, number = made[pool[0]]
    with agreed():
        if others := [rank for rank in pool if made[rank][0] != host]:
            raise ConfigError(
                f"schedule: weight_streaming needs the processes of a pipeline on one host, but {pool[0]} is on {host} "
                f"and {others[0]} on {made[others[0]][0]}; expected model_topo.process_topology: {{axes: [data, pipe], "
                "dims: [hosts, GPUs of a host]}"
            )
        if not first:
            try:
                descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            except OSError as error:
                raise ConfigError(
                    f"schedule: weight_streaming: {error.filename}: {error.strerror}; expected all processes of a host "
                    "in one container, of one user"
                ) from None

    memory = mmap(descriptor, size)
    gather(None)  # all have it
    os.close(descriptor)
    lock_pages(memory, device)
    return memory


def share_tensors(like: Mapping[str, Tensor], pool: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Make tensors of these shapes and dtypes, zeros, that the ranks of a pool share; see `share_memory`."""
    places, end = {}, 0
    for name, tensor in like.items():
        places[name], end = end, end + math.ceil(tensor.nbytes / ALIGNED) * ALIGNED
    memory = share_memory(max(1, end), pool, device)
    return {name: tensor_in(memory, places[name], tensor) for name, tensor in like.items()}


def tensor_in(memory: mmap, begin: int, like: Tensor) -> Tensor:
    """Return a tensor of this shape and dtype that begins at byte `begin`."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=begin).view(like.shape)

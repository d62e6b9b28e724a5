"""Bytes to a file from several threads.

A copy from memory into the system's cache keeps a core busy at about a gigabyte a second, which is less than most disks
take. Threads do it side by side: Python lets go of its lock in each call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")

WORKERS = min(4, os.cpu_count() or 1)
PIECE = 64 * 2**20  # bytes a write; a call takes 2 GB at most


def in_parallel(work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Do `work` for every item; the first error is raised when all have ended."""
    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(work, items):
            pass


def write_at(descriptor: int, place: int, tensor: Tensor) -> None:
    """Write a tensor's bytes to a place in a file.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    if not tensor.numel():
        return
    rest = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    while rest:
        written = os.pwrite(descriptor, rest[:PIECE], place)
        place += written
        rest = rest[written:]

"""Main memory that tensors free: kept for the next ones, and given back once it lies in pieces.

glibc returns every large block to the kernel, and its next use faults it in anew, page by page: a tenth of a training
step on a CPU, and far more in some virtual machines. So a run that computes on a CPU keeps all blocks in the heap, as
the CUDA allocator does. There, micro-batches of different lengths ask for blocks that do not fit into the gaps of the
ones before. What is in use stays the same from step to step, but the free memory between it grows.

Therefore resident memory is looked at after each step. Where it has grown by more than `GROWTH` over what a step takes
that began with an empty heap, all free pages go back to the kernel, and the next step faults in what it needs. Looking
takes some 20 microseconds; a release costs a step what each step would cost without keeping, and becomes rare, as the
measure is the largest of all steps after a release. Where the C library is another one, nothing happens.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import psutil

from training.callbacks import Callback

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics

GROWTH = 1.2
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h


def keep() -> None:
    """Let glibc keep the memory that is freed, for this process from here on."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


class FreedMemory:
    """Bounds what is kept; gives back at once what was freed so far.

    Args:
        kept: whether `keep` was called; without it there is nothing to bound.
    """

    def __init__(self, kept: bool) -> None:
        library = ctypes.CDLL(None)
        self._release = library.malloc_trim if kept and hasattr(library, "gnu_get_libc_version") else None
        self._process = psutil.Process()
        self._largest = 0  # bytes that a step took which began with an empty heap
        self._empty = True
        if self._release:
            self._release(0)  # what building the model has left

    def bound(self) -> None:
        """A step is over: give back what is free where it has become too much."""
        if self._release is None:
            return
        resident = self._process.memory_info().rss
        if self._empty:
            self._largest = max(self._largest, resident)
        self._empty = resident > GROWTH * self._largest
        if self._empty:
            self._release(0)


class BoundedMemory(Callback):
    """Bound the freed memory of a run that computes on a CPU."""

    def on_start(self, run: Run) -> None:
        self._freed = FreedMemory(kept=run.trainer.engine.device.type == "cpu")

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        self._freed.bound()

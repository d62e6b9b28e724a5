"""Keep main memory that tensors free, and give it back when it has become fragmented.

glibc returns every large block to the kernel, and its next use faults it in anew, page by page: a tenth of a training
step on a CPU, and far more in some virtual machines. So a run that computes on a CPU keeps all blocks in the heap, as
the CUDA allocator does. Micro-batches of different lengths then ask for blocks that do not fit into the gaps left by
earlier ones, and free memory between the blocks in use grows from step to step.

So after each step resident memory is compared with the largest step that began with an empty heap. Where it is more
than `GROWTH` times that, all free pages go back to the kernel. A look takes some 20 microseconds; a release costs the
next step what every step would cost without keeping. Does nothing with another C library.
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
_libc = ctypes.CDLL(None)
_IS_GLIBC = hasattr(_libc, "gnu_get_libc_version")


def keep() -> None:
    """Let glibc keep the memory that this process frees from now on."""
    if _IS_GLIBC:
        _libc.mallopt(_MMAP_MAX, 0)
        _libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


class BoundedMemory(Callback):
    """Bound the memory that `keep` keeps, in a run that computes on a CPU."""

    _active = _empty = False
    _largest = 0  # bytes of a step that began with an empty heap

    def on_start(self, run: Run) -> None:
        self._active = _IS_GLIBC and run.trainer.engine.device.type == "cpu"
        self._release()  # what building the model has freed

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        if not self._active:
            return
        resident = psutil.Process().memory_info().rss
        if self._empty:
            self._largest = max(self._largest, resident)
        self._empty = False
        if resident > GROWTH * self._largest:
            self._release()

    def _release(self) -> None:
        if self._active:
            _libc.malloc_trim(0)
        self._empty = True

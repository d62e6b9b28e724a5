"""Adding 16-bit gradients to fp32 sums, as they are against converted ones: a part of
`python -m benchmarks.throughput`.

A matrix of 4,096 x 11,008 in bf16, one thread (with a GPU: that GPU); the fastest of several passes counts.

- `gradient_sum_bytes`: moved for a parameter and micro-batch: the gradient, and the sum read and written; what was
  allocated on the way, beyond what a cache holds, counts twice, as it is written and read.
- `gradient_sum_speedup`: how many times as fast as with a conversion.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts import against_targets
from training.engine.gradient_sums import SLICE, add

SHAPE, PASSES = (4096, 11008), 8
TARGETS = {"gradient_sum_bytes": "at most 10", "gradient_sum_speedup": "at least 1.5"}


def measure(folder: Path) -> dict[str, Any]:
    """All figures."""
    del folder  # nothing is written
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total = torch.zeros(SHAPE, device=device)
    gradient = torch.randn(SHAPE, device=device).bfloat16()
    held = _held(lambda: add(total, gradient), device)
    moved = gradient.element_size() + 2 * total.element_size()
    converted, as_it_is = _seconds(lambda: total.add_(gradient.float())), _seconds(lambda: add(total, gradient))
    torch.set_num_threads(threads)
    return {
        "gradient_sum_bytes": moved + 2 * (held if held > 4 * SLICE else 0) / total.numel(),
        "gradient_sum_speedup": converted / as_it_is,
    }


def table(figures: dict[str, Any]) -> Table:
    return against_targets("bf16 gradients into fp32 sums", figures, TARGETS)


def _held(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that an operation took for itself."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    return max((event.cpu_memory_usage for event in found.events() or []), default=0)


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(PASSES):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)

"""The most memory that a process and each stage had at once.

On a GPU it is what torch allocated there; on a CPU the process's resident memory, from the kernel. That comes from
/proc and not from `getrusage`, whose figure a process inherits from the one that started it. Asking takes some 20
microseconds, telling the others one all-reduce of as many numbers as there are stages.
"""

from __future__ import annotations

import torch


def peak_memory() -> int:
    """Bytes that this process had at most, on its GPU where it uses one, else in main memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def peak_memory_by_stage(stage: int, stages: int) -> list[int]:
    """Bytes that the largest process of each stage had at most. All ranks call it, and all get the same list."""
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    peaks = torch.zeros(stages, dtype=torch.int64, device=device)
    peaks[stage] = peak_memory()
    torch.distributed.all_reduce(peaks, op=torch.distributed.ReduceOp.MAX)
    by_stage: list[int] = peaks.tolist()
    return by_stage

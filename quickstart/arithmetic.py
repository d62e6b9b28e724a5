"""The same sums in the same order on every CPU, so that the shipped run gives the same answers everywhere.

A sum of floats depends on its order, and that on how many threads share it and on how many numbers the processor takes
at once; after some thousand of them two machines write other words. So the run uses two cores, a thread in each
stage, and the instructions of AVX2, which x86 processors have had for ten years. It costs what more cores and wider
instructions would have saved: with AVX-512 a third of the time. GPUs and other processors give their own answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CORES = 2
AVX2 = {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def same_everywhere() -> Mapping[str, str]:
    """Keep this process and those that it starts to two cores; what their environment needs besides."""
    os.sched_setaffinity(0, distinct_cores(os.sched_getaffinity(0)))
    return AVX2 if _has_avx2() else {}


def distinct_cores(allowed: set[int], folder: Path = Path("/sys/devices/system/cpu")) -> set[int]:
    """Two of the processors that are allowed, on cores of their own where that can be seen."""
    by_core: dict[str, int] = {}
    for number in sorted(allowed, reverse=True):  # the first of a core's processors stays
        siblings = folder / f"cpu{number}" / "topology" / "thread_siblings_list"
        by_core[siblings.read_text() if siblings.is_file() else str(number)] = number
    apart = sorted(by_core.values())
    return set([*apart, *sorted(allowed - set(apart))][:CORES])


def _has_avx2() -> bool:
    info = Path("/proc/cpuinfo")
    return info.is_file() and " avx2 " in info.read_text()

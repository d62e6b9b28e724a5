"""Memory that a run keeps is bounded: each step's blocks are too large for the gaps that the steps before left."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

# Of each block the beginning stays in use after its step, so that gaps cannot grow together.
STEPS = """
import ctypes, psutil, sys
from training.distributed.freed_memory import FreedMemory, keep
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.realloc.restype, library.realloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
keep()
process = psutil.Process()
before = process.memory_info().rss
freed_memory = FreedMemory(kept=sys.argv[1] == "bounded")
for step in range(40):
    blocks = []
    for _ in range(40):
        size = 400_000 + 10_000 * step
        blocks.append(library.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
    for block in blocks:
        library.realloc(block, 64)
    freed_memory.bound()
print(40 * size, process.memory_info().rss - before)
"""


def grown(name: str) -> tuple[int, int]:
    """Bytes of the largest step's blocks, and those by which resident memory has grown after all steps."""
    output = subprocess.run(
        [sys.executable, "-c", STEPS, name], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    largest, resident = map(int, output.split())
    return largest, resident


def test_kept_memory_stays_near_what_a_step_needs() -> None:
    largest, resident = grown("bounded")
    assert resident < 2 * largest


def test_without_a_bound_it_climbs() -> None:
    """The steps above do what the bound is for."""
    largest, resident = grown("unbounded")
    assert resident > 10 * largest

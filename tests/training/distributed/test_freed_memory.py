"""The memory that a run keeps is bounded, although each step's blocks are too large for the gaps of earlier steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

# The beginning of each block stays in use after its step, so that gaps cannot merge.
STEPS = """
import ctypes, psutil, sys
from types import SimpleNamespace
from training.distributed.freed_memory import BoundedMemory, keep
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.realloc.restype, library.realloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
keep()
before = psutil.Process().memory_info().rss
bounded = BoundedMemory()
engine = SimpleNamespace(device=SimpleNamespace(type=sys.argv[1]))
bounded.on_start(SimpleNamespace(trainer=SimpleNamespace(engine=engine)))
for step in range(40):
    blocks = []
    for _ in range(40):
        size = 400_000 + 10_000 * step
        blocks.append(library.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
    for block in blocks:
        library.realloc(block, 64)
    bounded.on_step_end(None, None, None)
print((psutil.Process().memory_info().rss - before) / (40 * size))
"""


@pytest.mark.parametrize(("device", "least", "most"), [("cpu", 0, 2), ("cuda", 10, 1000)])
def test_kept_memory_is_bounded_on_a_cpu(device: str, least: float, most: float) -> None:
    """In units of the largest step's blocks; without the bound, as on a GPU, the same steps grow without limit."""
    command = [sys.executable, "-c", STEPS, device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert least <= float(done.stdout) < most

"""The loss of a last stage, chunk by chunk against all logits at once: a part of `python -m benchmarks.memory`.

4,096 tokens, 131,072 words, hidden size 576; forward and backward pass, in fp32 and bf16. Each form runs in processes
of its own, in turn, and the fastest of its passes counts. The peak is the largest resident memory of the first pass
above what the process held before it; memory of this size comes from the kernel and goes back to it, so no allocator
keeps it. With a GPU it is what torch allocated there.

- `lean_loss_peak_vs_plain`, `lean_loss_time_vs_plain`: the larger ratio of the two dtypes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.parts import against_targets
from benchmarks.ranks import run_ranks, tell

TOKENS, WORDS, WIDTH = 4096, 131072, 576
DTYPES = ("float32", "bfloat16")
FORMS = ("plain", "lean")
PROCESSES, PASSES = 2, 2  # of each form, and in each process
TARGETS = {"lean_loss_peak_vs_plain": "at most 0.15", "lean_loss_time_vs_plain": "at most 1.1"}


def measure(folder: Path) -> dict[str, Any]:
    """All figures."""
    found = {dtype: {form: {"peak_mb": 0.0, "seconds": float("inf")} for form in FORMS} for dtype in DTYPES}
    for dtype in DTYPES:
        for form in FORMS * PROCESSES:
            one, all_ = run_ranks(None, "benchmarks.lean_loss", folder, form, dtype), found[dtype][form]
            all_["peak_mb"] = max(all_["peak_mb"], one["peak_mb"])
            all_["seconds"] = min(all_["seconds"], one["seconds"])
    return {
        "lean_loss_peak_vs_plain": max(ratio(each, "peak_mb") for each in found.values()),
        "lean_loss_time_vs_plain": max(ratio(each, "seconds") for each in found.values()),
        "lean_loss": found,
    }


def ratio(forms: dict[str, dict[str, float]], what: str) -> float:
    return forms["lean"][what] / forms["plain"][what]


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    made = against_targets(f"loss of {TOKENS:,} tokens over {WORDS:,} words, hidden size {WIDTH}", figures, TARGETS)
    for dtype in DTYPES:
        for form in FORMS:
            found = figures["lean_loss"][dtype][form]
            made.add_row(f"{form}, {dtype}", f"{found['peak_mb']:,.0f} MB, {found['seconds']:.1f} s", "")
    return made


def work(form: str, dtype_name: str) -> dict[str, float]:
    """One process: the peak of its first pass and the time of its fastest."""
    import torch
    import torch.nn.functional as F

    from models.lean_loss import linear_cross_entropy
    from training.metrics.peak_memory import peak_memory

    def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    loss = plain if form == "plain" else linear_cross_entropy
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, device=device).to(getattr(torch, dtype_name)).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, device=device).mul_(0.05).to(hidden.dtype).requires_grad_()
    targets = torch.randint(0, WORDS, (TOKENS,), device=device)
    loss(hidden[:8], weight, targets[:8]).backward()  # what torch sets up at the first use
    hidden.grad = weight.grad = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel begins its record of the peak again
    before = peak_memory()
    seconds, peak = float("inf"), 0
    for _ in range(PASSES):
        hidden.grad = weight.grad = None
        begin = time.perf_counter()
        loss(hidden, weight, targets).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - begin)
        peak = peak or peak_memory() - before
    return {"peak_mb": peak / 1e6, "seconds": seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    tell(arguments.folder, work(arguments.form, arguments.dtype))

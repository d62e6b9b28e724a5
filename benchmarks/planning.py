"""The planner against measurement: `python -m benchmarks.memory --only planner`.

Two stages train a llama of 160M parameters for two steps, in fp32 and bf16, with AdamW and Lion, with and without
recomputation, with either schedule. Each rank's memory is read before the model is built and at its highest point
afterwards: the growth of resident memory on a CPU, what torch allocated on a GPU (there one process, as a machine may
have only one, and so 1f1b alone). On a CPU the C library is told to give back what is freed: a run keeps it, to save
time, and what is kept would count as used.
The plan says what each rank needs; `planner_error` is the largest relative error of all cases and ranks,
`planner_errors` lists each case's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.table import Table

from benchmarks.ranks import run_ranks, tell

LENGTH, MICRO_BATCHES, STEPS = 1024, 4, 2
MMAP_THRESHOLD, ONE_MB = -3, 2**20  # of malloc.h
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
ADAMW, LION = {"type": "AdamW", "params": {"lr": 1.0e-5}}, {"type": "Lion", "params": {"lr": 1.0e-5}}
CASES: dict[str, dict[str, Any]] = {
    "fp32, AdamW": {"optimizer": ADAMW},
    "fp32, AdamW, dualpipev": {"optimizer": ADAMW, "schedule": "dualpipev"},
    "fp32, AdamW, recomputed": {"optimizer": ADAMW, "use_grad_ckpt": True},
    "fp32, AdamW, stage 0": {"optimizer": ADAMW, "use_grad_ckpt": True, "zero_optimization": {"stage": 0}},
    "bf16, AdamW": {"optimizer": ADAMW, "bf16": {"enabled": True}},
    "bf16, AdamW, dualpipev": {"optimizer": ADAMW, "bf16": {"enabled": True}, "schedule": "dualpipev"},
    "bf16, AdamW, recomputed": {"optimizer": ADAMW, "bf16": {"enabled": True}, "use_grad_ckpt": True},
    "bf16, Lion, recomputed": {"optimizer": LION, "bf16": {"enabled": True}, "use_grad_ckpt": True},
}


def measure(folder: Path) -> dict[str, Any]:
    """Predicted and measured bytes of every rank of every case, and the largest relative error."""
    import torch

    stages = 1 if torch.cuda.is_available() else 2
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    cases = {}
    for name, keys in CASES.items():
        if stages == 1 and "schedule" in keys:
            continue
        cases[name] = run_ranks(stages, "benchmarks.planning", folder, "--case", json.dumps(keys))
    errors = {
        name: max(abs(plan / peak - 1) for plan, peak in zip(case["planned"], case["measured"], strict=True))
        for name, case in cases.items()
    }
    return {"planner_error": max(errors.values()), "planner_errors": errors, "planner_cases": cases}


def table(figures: dict[str, Any]) -> Table:
    """Each case, rank by rank."""
    worst = f"largest error {figures['planner_error']:.1%}"
    made = Table(title=f"peak memory, {MICRO_BATCHES} micro-batches of {LENGTH} tokens, GB", caption=worst)
    for heading in ("case", "rank", "planned", "measured", "error"):
        made.add_column(heading, justify="left" if heading == "case" else "right")
    for name, case in figures["planner_cases"].items():
        for rank, (plan, peak) in enumerate(zip(case["planned"], case["measured"], strict=True)):
            made.add_row(name, str(rank), f"{plan / 1e9:.2f}", f"{peak / 1e9:.2f}", f"{plan / peak - 1:+.1%}")
    return made


def work(keys: dict[str, Any], folder: Path) -> None:
    """One rank's work: plan, build, train, and tell what both came to."""
    from benchmarks.full_rows import rows_loader, run_config
    from benchmarks.steps import joined
    from models.spec import ModelSpec
    from training.distributed import freed_memory, processes
    from training.engine.pipeline import PipelineTrainer
    from training.metrics.devices import this_device
    from training.metrics.peak_memory import peak_memory
    from training.plan.auto import divide
    from training.plan.inputs import Basis, Workload
    from training.plan.plan import Plan

    config = run_config(folder, int(os.environ["WORLD_SIZE"]), MICRO_BATCHES, LENGTH, **keys)
    with patch.object(freed_memory, "keep", _give_back_memory), joined(config):
        spec = ModelSpec.from_folder(folder)
        plan = Plan.make(Basis(config, spec, Workload.assumed(config), this_device()))
        loader = rows_loader(config, MODEL["vocab_size"])
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest point so far is forgotten
        before = peak_memory()
        trainer = PipelineTrainer.build(config, spec, folder, divide(config, spec))
        for step in range(STEPS):
            trainer.train_step(loader, loader.batch(step))
        told = processes.gather((plan.stages[trainer.stage].memory.peak, peak_memory() - before))
        planned, measured = zip(*told, strict=True)
        tell(folder, {"planned": planned, "measured": measured})


def _give_back_memory() -> None:
    """Let every block of a MB or more come from the kernel and go back when it is freed."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, ONE_MB)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=json.loads, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.case, arguments.folder)

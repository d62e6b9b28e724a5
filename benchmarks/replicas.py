"""What it gives that replicas sum their gradients while they compute: a part of `python -m benchmarks.throughput`.

Two replicas of one stage, of one thread each, train in fp32 on two micro-batches of 128 tokens each: with DeepSpeed's
sums after the last backward pass, and with sums that begin during it (`training.engine.replica_sums`).

- `early_sums_speedup`: how many times as fast a step is.
- `early_sums_sent`: the bytes that both send each other in a step, gradients and weights, of what they were.

Both take their steps in turn (`benchmarks.turns`). Bytes are those of the loopback interface: of the rounds the least
counts, as others may use it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.ideal import MODEL
from benchmarks.turns import Turn, Turns

MICRO_BATCHES, LENGTH, ROUNDS = 2, 128, 7
# `reduce_scatter: true` is DeepSpeed's default; who says it leaves the sums to DeepSpeed.
WAYS: dict[str, dict[str, Any]] = {"afterwards": {"reduce_scatter": True}, "while computing": {}}


def measure(folder: Path) -> dict[str, Any]:
    """Seconds and bytes of a step either way, and their ratios."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    with Turns(folder) as turns:
        for way in WAYS:
            turns.add(way, "benchmarks.replicas", 2, "--way", way)
        turns.rounds(ROUNDS)
    found = {
        way: {"seconds": turns.seconds(way), "sent": min(step["sent"] for step in turns.steps(way))} for way in WAYS
    }
    before, after = (found[way] for way in WAYS)
    return {
        "early_sums_speedup": turns.ratio("while computing", "afterwards"),
        "early_sums_sent": after["sent"] / before["sent"],
        "replicas": found,
    }


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    ratios = f"{figures['early_sums_speedup']:.3f} times as fast, {figures['early_sums_sent']:.3f} of the bytes"
    made = Table(title=f"two replicas, {MICRO_BATCHES} micro-batches of {LENGTH} tokens, fp32", caption=ratios)
    for column in ("gradients are summed", "step, s", "sent, MB"):
        made.add_column(column, justify="right")
    for way, row in figures["replicas"].items():
        made.add_row(way, f"{row['seconds']:.3f}", f"{row['sent'] / 1e6:.0f}")
    return made


def work(way: str, folder: Path) -> None:
    """One rank's work."""
    import psutil
    import torch

    from benchmarks.full_rows import rows_loader, run_config
    from benchmarks.steps import joined, train
    from data.loader import GlobalBatch, Loader
    from models.api import read_spec
    from training.engine.pipeline import PipelineTrainer
    from training.plan.auto import divide

    model = folder.parent
    config = run_config(model, 1, 2 * MICRO_BATCHES, LENGTH, replicas=2, zero_optimization={"stage": 1} | WAYS[way])
    with joined(config):
        torch.set_num_threads(1)
        spec = read_spec(model)
        trainer = PipelineTrainer.build(config, spec, model, divide(config, spec))
        take_step, sent = trainer.train_step, 0

        def counted(loader: Loader, batch: GlobalBatch) -> float:
            nonlocal sent
            before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            loss = take_step(loader, batch)
            sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
            return loss

        trainer.train_step = counted  # type: ignore[method-assign]
        train(trainer, rows_loader(config, MODEL["vocab_size"]), Turn(folder), lambda: {"sent": sent})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.way, arguments.folder)

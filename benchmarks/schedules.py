"""What `schedule: dualpipev` gives at few micro-batches: a part of `python -m benchmarks.throughput`.

Two stages of one thread each train the same model on the same four micro-batches with either schedule. By theory 1f1b
takes (4 + 2 - 1) / 4 = 1.25 times as long as a pipeline without a bubble.

- `dualpipev_vs_1f1b`: how many times as fast a step is.
- `dualpipev_peak_vs_1f1b`: the memory of the larger stage at its peak, above what its process had before the model.

Both take their steps in turn (`benchmarks.turns`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from benchmarks.turns import Turn, Turns
from training.schedule.instructions import Schedule

STAGES, MICRO_BATCHES, LENGTH = 2, 4, 256
ROUNDS = 9
PARTS: dict[Schedule, list[int]] = {"1f1b": [7, 7], "dualpipev": [4, 3, 3, 4]}
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def measure(folder: Path) -> dict[str, Any]:
    """Seconds of a step and bytes at the peak with either schedule, and their ratios."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    with Turns(folder) as turns:
        for schedule in PARTS:
            turns.add(schedule, "benchmarks.schedules", STAGES, "--schedule", schedule)
        turns.rounds(ROUNDS)
    seconds = {schedule: turns.seconds(schedule) for schedule in PARTS}
    peak = {schedule: turns.steps(schedule)[-1]["peak"] for schedule in PARTS}
    return {
        "dualpipev_vs_1f1b": turns.ratio("dualpipev", "1f1b"),
        "dualpipev_peak_vs_1f1b": peak["dualpipev"] / peak["1f1b"],
        "schedules": {schedule: {"seconds": seconds[schedule], "peak": peak[schedule]} for schedule in PARTS},
    }


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    ratio = f"{figures['dualpipev_vs_1f1b']:.3f} times as fast, {figures['dualpipev_peak_vs_1f1b']:.3f} of the memory"
    title = f"schedules, {STAGES} stages, {MICRO_BATCHES} micro-batches of {LENGTH} tokens"
    made = Table(title=title, caption=f"dualpipev over 1f1b: {ratio}")
    for column in ("schedule", "step, s", "peak of the larger stage, MB"):
        made.add_column(column, justify="right")
    for schedule, row in figures["schedules"].items():
        made.add_row(schedule, f"{row['seconds']:.3f}", f"{row['peak'] / 1e6:.0f}")
    return made


def work(schedule: Schedule, folder: Path) -> None:
    """One rank's work."""
    import torch

    from benchmarks.full_rows import rows_loader, run_config
    from benchmarks.steps import joined, train
    from models.api import read_spec
    from training.engine.pipeline import PipelineTrainer
    from training.metrics.peak_memory import peak_memory, peak_memory_by_stage
    from training.plan.auto import divide

    model = folder.parent
    config = run_config(model, STAGES, MICRO_BATCHES, LENGTH, schedule=schedule, parts=PARTS[schedule])
    with joined(config):
        torch.set_num_threads(1)
        loader = rows_loader(config, MODEL["vocab_size"])
        before = peak_memory()
        spec = read_spec(model)
        trainer = PipelineTrainer.build(config, spec, model, divide(config, spec))

        def peak() -> dict[str, int]:
            return {"peak": max(peak_memory_by_stage(trainer.stage, STAGES)) - before}

        train(trainer, loader, Turn(folder), peak)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=get_args(Schedule), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.schedule, arguments.folder)

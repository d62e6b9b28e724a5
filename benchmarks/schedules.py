"""What `schedule: dualpipev` gives at few micro-batches: a part of `python -m benchmarks.throughput`.

Two stages of one thread each train the same model on the same four micro-batches with either schedule. By theory 1f1b
takes (4 + 2 - 1) / 4 = 1.25 times as long as a pipeline without a bubble.

- `dualpipev_vs_1f1b`: how many times as fast a step is.
- `dualpipev_peak_vs_1f1b`: the memory of the larger stage at its peak, above what its process had before the model.

The runs are repeated in turn, and the fastest step of each counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from benchmarks.ranks import run_ranks
from training.instructions import Schedule

STAGES, MICRO_BATCHES, LENGTH = 2, 4, 256
ROUNDS, STEPS = 3, 4  # measured, after one to warm up
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
    found: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in PARTS}
    for _ in range(ROUNDS):
        for schedule, results in found.items():
            run_ranks(STAGES, "benchmarks.schedules", "--schedule", schedule, "--folder", str(folder))
            results.append(json.loads((folder / "result.json").read_text(encoding="utf-8")))
    seconds = {schedule: min(result["seconds"] for result in results) for schedule, results in found.items()}
    peak = {schedule: min(result["peak"] for result in results) for schedule, results in found.items()}
    return {
        "dualpipev_vs_1f1b": seconds["1f1b"] / seconds["dualpipev"],
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
    """One rank's work: a step to warm up, then the fastest of `STEPS` steps."""
    import time

    import torch

    from data.loader import Loader
    from data.sample_set import InMemory
    from models.spec import ModelSpec
    from training import distributed
    from training.config import TrainConfig
    from training.peak_memory import peak_memory, peak_memory_by_stage
    from training.pipeline_trainer import PipelineTrainer

    config = TrainConfig.model_validate(
        {
            "model_path": str(folder),
            "data_path": "",
            "save_path": "",
            "from_scratch": True,
            "train_batch_size": MICRO_BATCHES,
            "schedule": schedule,
            "model_topo": {"process_topology": {"dims": [STAGES, 1]}, "parts": PARTS[schedule]},
        }
    )
    place = distributed.Place.from_environment()
    assert place is not None
    distributed.start(place, config.model_topo)
    torch.set_num_threads(1)
    spec = ModelSpec.from_folder(folder)
    ids = torch.randint(0, MODEL["vocab_size"], (MICRO_BATCHES, LENGTH)).tolist()
    loader = Loader(InMemory([{"input_ids": row, "labels": row} for row in ids]), MICRO_BATCHES, 1, 1, seed=0)
    before = peak_memory()
    trainer = PipelineTrainer.build(config, spec, folder, total_steps=STEPS + 1)
    seconds = []
    for step in range(STEPS + 1):
        begin = time.perf_counter()
        trainer.train_step(loader, loader.batch(step))
        seconds.append(time.perf_counter() - begin)
    peak = max(peak_memory_by_stage(trainer.stage, STAGES)) - before
    if place.rank == 0:
        (folder / "result.json").write_text(json.dumps({"seconds": min(seconds[1:]), "peak": peak}), encoding="utf-8")
    distributed.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=get_args(Schedule), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.schedule, arguments.folder)

"""Memory over the steps of a run on a CPU, with lengths that vary: a part of `python -m benchmarks.memory`.

Two stages of one thread each train on samples of 50 to 172 tokens, packed as a run packs them, in three ways that make
their steps in turn (`benchmarks.turns`): `bounded` as a run does, `kept` without its bound (both
`training.distributed.freed_memory`), and `returned`, with a C library that gives large blocks back at once.

- `memory_climb`: the peak of the larger stage after the last step over that after the first two, by way.
- `bounded_vs_returned`, `bounded_vs_kept`: how many times as fast a step is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.table import Table

from benchmarks.turns import Turn, Turns

STAGES, SAMPLES, LENGTH = 2, 16, 172
ROUNDS = 40
WAYS = ("bounded", "kept", "returned")
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 16384,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}


def measure(folder: Path) -> dict[str, Any]:
    """Peaks and seconds of a step in each way, and their ratios."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    with Turns(folder) as turns:
        for way in WAYS:
            turns.add(way, "benchmarks.climb", STAGES, "--way", way)
        turns.rounds(ROUNDS)
    peaks = {way: [step["peak"] for step in turns.steps(way)] for way in WAYS}
    return {
        "memory_climb": {way: peaks[way][-1] / peaks[way][0] for way in WAYS},
        "bounded_vs_returned": turns.ratio("bounded", "returned"),
        "bounded_vs_kept": turns.ratio("bounded", "kept"),
        "climb": {way: {"seconds": turns.seconds(way), "peaks": peaks[way]} for way in WAYS},
    }


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    ratios = " and ".join(f"{figures[f'bounded_vs_{way}']:.3f} as fast as {way}" for way in ("kept", "returned"))
    made = Table(title=f"memory over {ROUNDS} steps, the larger of {STAGES} stages", caption=f"bounded: {ratios}")
    for column in ("freed memory", "step, s", "peak after 2 steps, MB", f"after {ROUNDS + 1}, MB", "climb"):
        made.add_column(column, justify="right")
    for way, row in figures["climb"].items():
        first, last = (row["peaks"][number] / 1e6 for number in (0, -1))
        made.add_row(way, f"{row['seconds']:.3f}", f"{first:.0f}", f"{last:.0f}", f"{last / first:.3f}")
    return made


def work(way: str, folder: Path) -> None:
    """One rank's work."""
    import numpy
    import torch

    from benchmarks.full_rows import run_config
    from benchmarks.steps import joined, train
    from data.sample_set import InMemory
    from models.api import read_spec
    from training.data_setup import build_loader
    from training.distributed import freed_memory
    from training.engine.pipeline import PipelineTrainer
    from training.metrics.peak_memory import peak_memory_by_stage
    from training.plan.auto import divide

    model = folder.parent
    config = run_config(model, STAGES, SAMPLES, LENGTH, train_micro_batch_size_per_gpu=4, parts=[5, 3])
    chance = numpy.random.default_rng(0)
    ids = [chance.integers(0, MODEL["vocab_size"], length).tolist() for length in chance.integers(50, LENGTH, 112)]
    samples = InMemory([{"input_ids": each, "labels": each} for each in ids])
    keep = freed_memory.keep if way != "returned" else lambda: None
    with patch.object(freed_memory, "keep", keep), joined(config):
        torch.set_num_threads(1)
        spec = read_spec(model)
        trainer = PipelineTrainer.build(config, spec, model, divide(config, spec))
        freed = freed_memory.FreedMemory(kept=way == "bounded")

        def peak() -> dict[str, int]:
            freed.bound()
            return {"peak": max(peak_memory_by_stage(trainer.stage, STAGES))}

        train(trainer, build_loader(samples, config), Turn(folder), peak)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.way, arguments.folder)

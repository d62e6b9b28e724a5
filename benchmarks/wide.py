"""One row, and one layer, over two processes: a part of `python -m benchmarks.throughput`.

A llama of 4 blocks trains in fp32 on rows of 8,192 tokens, one at a time: in one process of one thread, and in two that
share the row (`model_topo.sequence: 2`) or each layer (the tensor axis). Twice the speed of one process is the ideal.
What two cores give at all is told by two processes that train a model each, at the same time, as they share the memory.

- `sequence_vs_ideal`, `tensor_vs_ideal`: the share of the ideal that is reached; 0.85 and 0.75 are the least.
- `wide_copies_vs_twice`: the same for the two processes with a model each.

All ways take their steps in turn (`benchmarks.turns`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.ideal import MODEL
from benchmarks.turns import Turn, Turns

LENGTH, BLOCKS, ROUNDS = 8192, 4, 5
ONE, COPY, OTHER = "one process", "two processes with a model each: one", "two processes with a model each: the other"
ROW, LAYER = "two that share each row", "two that share each layer"
WIDE: dict[str, dict[str, Any]] = {
    ROW: {"process_topology": {"dims": [1, 2]}, "sequence": 2},
    LAYER: {"process_topology": {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}},
}


def measure(folder: Path) -> dict[str, Any]:
    """Tokens per second of each way, and the shares of the ideal."""
    model = MODEL | {"num_hidden_layers": BLOCKS, "max_position_embeddings": LENGTH}
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    with Turns(folder) as turns:
        for way in (ONE, *WIDE, COPY, OTHER):
            turns.add(way, "benchmarks.wide", 2 if way in WIDE else 1, "--way", way, beside=way == OTHER)
        turns.rounds(ROUNDS)
        return {
            "sequence_vs_ideal": turns.ratio(ROW, ONE) / 2,
            "tensor_vs_ideal": turns.ratio(LAYER, ONE) / 2,
            "wide_copies_vs_twice": sum(turns.ratio(way, ONE) for way in (COPY, OTHER)) / 2,
            "wide_tokens_per_s": {way: turns.speed(way) for way in (ONE, *WIDE, COPY, OTHER)},
        }


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    shares = {ROW: figures["sequence_vs_ideal"], LAYER: figures["tensor_vs_ideal"]}
    copies = f"two processes with a model each reach {figures['wide_copies_vs_twice']:.3f} of twice the speed of one"
    made = Table(title=f"rows of {LENGTH:,} tokens, fp32, one thread a process", caption=copies)
    for column in ("way", "tokens/s", "of the ideal"):
        made.add_column(column, justify="left" if column == "way" else "right")
    for way, speed in figures["wide_tokens_per_s"].items():
        made.add_row(way, f"{speed:,.0f}", f"{shares[way]:.3f}" if way in shares else "")
    return made


def work(way: str, folder: Path) -> None:
    """One rank's work."""
    import torch

    from benchmarks.full_rows import rows_loader, run_config
    from benchmarks.steps import joined, train
    from models.api import read_spec
    from training.engine.pipeline import PipelineTrainer
    from training.plan.auto import divide

    model = folder.parent
    keys = {"model_topo": WIDE[way]} if way in WIDE else {}
    config = run_config(model, 1, 1, LENGTH, zero_optimization={"stage": 0}, **keys)
    with joined(config):
        torch.set_num_threads(1)
        spec = read_spec(model)
        trainer = PipelineTrainer.build(config, spec, model, divide(config, spec))
        train(trainer, rows_loader(config, MODEL["vocab_size"]), Turn(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.way, arguments.folder)

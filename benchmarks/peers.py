"""Compare a two-stage pipeline with ZeRO-3 and transformers' Trainer.

A llama of the width and vocabulary of SmolLM2-135M with 12 layers trains from random weights with AdamW, on the same
samples either way, a step of each in turn; tokens are those without padding. The faster schedule counts.

- `pipeline_vs_zero3`: two processes of one thread; rows of 256 tokens, 32 a step, micro-batches of 1, fp32.
- `packed_vs_hf_trainer`: maths problems and tool dialogues of up to 1,024 tokens (`benchmarks.tokenizing`), bf16. The
  Trainer is one process with both cores, its micro-batches of 4 padded by transformers' own collator.
- `full_vs_hf_trainer`: full rows of 512 tokens, two a micro-batch, blocks compiled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from benchmarks.parts import Figures, run_parts, table_of
from benchmarks.tokenizing import RECORDS, make_tokenizer
from benchmarks.turns import Turn, Turns
from training.schedule.instructions import Schedule

if TYPE_CHECKING:  # the parent process needs no torch
    from data.sample_set import SampleSet
    from training.config.keys import TrainConfig

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
ROUNDS = 3
TRAINER_BATCH = 4  # samples in a micro-batch of the Trainer; 8 take more memory than there is
BF16 = {"bf16": {"enabled": True}}
TUNED_ZERO = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "stage3_prefetch_bucket_size": 50_000_000}
# The figure's peer, at least how many times as fast the pipeline should be, and the run.
CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "pipeline_vs_zero3": ("ZeRO-3", 1.7, {"max_seq_len": 256, "train_batch_size": 32}),
    "packed_vs_hf_trainer": ("Trainer", 3, {"max_seq_len": 1024, "train_batch_size": 64, **BF16}),
    "full_vs_hf_trainer": (
        "Trainer",
        2.2,
        {"max_seq_len": 512, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "compile": True, **BF16},
    ),
}


def measure(folder: Path) -> Figures:
    """Measure all three."""
    make_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "config.json").write_text(json.dumps(MODEL))
    figures: Figures = {"peers": {}}
    for name, (peer, _, _) in CASES.items():
        with Turns(folder / name) as turns:
            for way in (*get_args(Schedule), peer):  # the Trainer would take the launcher's variables for its own
                turns.add(way, None if way == "Trainer" else 2, "benchmarks.peers", "train", case=name, way=way)
            turns.rounds(ROUNDS)
        figures["peers"][name] = speeds = {way: turns.speed(way) for way in turns.ways}
        figures[name] = turns.ratio(max(get_args(Schedule), key=speeds.__getitem__), peer)
    return figures


def table(figures: Figures) -> Table:
    """Show the speeds and the ratios."""
    columns = ("figure", *get_args(Schedule), "peer", "tokens/s", "times as fast", "target")
    rows = []
    for name, (peer, target, _) in CASES.items():
        *ours, theirs = (f"{speed:,.0f}" for speed in figures["peers"][name].values())
        rows.append((name, *ours, peer, theirs, f"{figures[name]:.2f}", str(target)))
    return table_of("tokens/s without padding", columns, rows)


def train_way(folder: Path, case: str, way: str) -> None:
    """Train in one process of a way."""
    import torch

    from benchmarks.steps import joined, train
    from benchmarks.trainers import by_transformers
    from models.api import read_spec
    from training.config.keys import TrainConfig
    from training.data_setup import build_loader
    from training.engine.pipeline import PipelineTrainer
    from training.engine.zero import ZeroTrainer
    from training.plan.auto import divide

    model, keys = folder.parents[1] / "tokenizer", dict(CASES[case][2])
    keys |= {"schedule": way} if way in get_args(Schedule) else {}
    keys |= {"zero_optimization": TUNED_ZERO} if way == "ZeRO-3" else {}
    paths = {"model_path": model, "save_path": folder / "run", "cache_dir": folder.parents[1] / "cache"}
    config = TrainConfig.model_validate(
        {key: str(path) for key, path in paths.items()}
        | {"data_path": RECORDS, "template_fallback": "rewrite", "from_scratch": True}
        | {"model_topo": {"process_topology": {"dims": {"ZeRO-3": [1, 2], "Trainer": [1, 1]}.get(way, [2, 1])}}}
        | keys
    )
    if way == "Trainer":
        torch.set_num_threads(os.cpu_count() or 1)
        by_transformers(config, read_samples(config, case), Turn(folder), TRAINER_BATCH)
        return
    engine = ZeroTrainer if way == "ZeRO-3" else PipelineTrainer
    with joined(config):
        loader, spec = build_loader(read_samples(config, case), config), read_spec(model)
        train(engine.build(config, spec, model, divide(config, spec, engine.in_stages)), loader, Turn(folder))


def read_samples(config: TrainConfig, case: str) -> SampleSet:
    """Read the records, or make full rows."""
    from rich.console import Console

    from benchmarks.steps import random_rows
    from training.data_setup import RecordReader

    if case == "packed_vs_hf_trainer":
        return RecordReader(config, Path(config.model_path), Console(quiet=True)).read("data", config.data_path)
    return random_rows(MODEL["vocab_size"], config.train_batch_size, config.max_seq_len)


if __name__ == "__main__":
    run_parts("A pipeline beside its peers.", {"peers": (measure, table)}, {"train": train_way})

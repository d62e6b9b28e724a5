"""A two-stage pipeline beside ZeRO-3 and transformers' Trainer: a part of `python -m benchmarks.throughput`.

A llama of the width and vocabulary of SmolLM2-135M with 12 layers, where the head is 40 % of the work. All runs train
the same samples in the same steps from random weights with AdamW, on two cores; the first step is left out, and useful
tokens per second are those without padding.

- `pipeline_vs_zero3`: two processes of one thread either way, through Pipetune's own engines; rows of 256 tokens, a
  global batch of 16, micro-batches of 1, fp32.
- `packed_vs_hf_trainer`: worked maths problems and tool dialogues of `../shared/data` (else the shipped records) of up
  to 1,024 tokens, bf16. Pipetune packs them, as it does by default. The Trainer is one process with both cores, its
  micro-batches of 8 padded to their longest sample by transformers' own collator.
- `full_vs_hf_trainer`: the same for rows of 512 tokens without padding, all of them supervised.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.table import Table

from benchmarks.ideal import LARGE_HEAD
from benchmarks.ranks import run_alone, run_ranks, tell
from benchmarks.tokenizing import SAMPLES, SHARED, make_tokenizer

if TYPE_CHECKING:  # the parent process needs no torch
    from data.sample_set import SampleSet
    from training.config import TrainConfig

STEPS = 3  # measured, after one to warm up
TRAINER_BATCH = 8  # samples in a micro-batch of the Trainer
BF16 = {"bf16": {"enabled": True}}
RECORDS = [str(SHARED / "gsm8k" / "train.jsonl"), str(SHARED / "toolcall" / "*.json")]
CASES: dict[str, dict[str, Any]] = {
    "short": {"max_seq_len": 256, "train_batch_size": 16},
    "instructions": {"max_seq_len": 1024, "train_batch_size": 32, **BF16},
    "full": {"max_seq_len": 512, "train_batch_size": 16, **BF16},
}
TUNED_ZERO = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "stage3_prefetch_bucket_size": 50_000_000}
# The figure, its case, the peer, and at least how many times as fast the pipeline should be.
FIGURES = {
    "pipeline_vs_zero3": ("short", "zero", 1.7),
    "packed_vs_hf_trainer": ("instructions", "trainer", 3),
    "full_vs_hf_trainer": ("full", "trainer", 1),
}
NAMES = {"zero": "ZeRO-3, two processes", "trainer": "transformers' Trainer, two cores"}


def measure(folder: Path) -> dict[str, Any]:
    """All figures, and the tokens per second behind them."""
    make_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "config.json").write_text(json.dumps(LARGE_HEAD))
    figures: dict[str, Any] = {"peers": {}}
    for name, (case, peer, _) in FIGURES.items():
        write_config(folder, case)
        speeds = {"pipeline": launch(folder, case, "pipeline"), peer: launch(folder, case, peer)}
        figures[name] = speeds["pipeline"] / speeds[peer]
        figures["peers"][name] = speeds
    return figures


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    made = Table(title="useful tokens/s of two stages with one thread each")
    for column in ("figure", "pipeline", "peer", "tokens/s", "times as fast", "target"):
        made.add_column(column, justify="left" if column in ("figure", "peer") else "right")
    for name, (_, peer, target) in FIGURES.items():
        speeds = figures["peers"][name]
        row = (f"{speeds['pipeline']:,.0f}", NAMES[peer], f"{speeds[peer]:,.0f}", f"{figures[name]:.2f}", str(target))
        made.add_row(name, *row)
    return made


def write_config(folder: Path, case: str) -> None:
    """A run's keys."""
    keys = {
        "model_path": str(folder / "tokenizer"),
        "data_path": RECORDS if SHARED.is_dir() else [str(SAMPLES)],
        "save_path": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "from_scratch": True,
        **CASES[case],
    }
    (folder / "run.yml").write_text(yaml.safe_dump(keys))


def launch(folder: Path, case: str, kind: str) -> float:
    """Useful tokens per second of one way to train."""
    words = ("--case", case, "--kind", kind)
    if kind == "trainer":  # it would take the launcher's variables for a distributed run
        return float(run_alone("benchmarks.peers", folder, *words))
    return float(run_ranks(2, "benchmarks.peers", folder, *words))


def work(folder: Path, case: str, kind: str) -> None:
    """One process of a way to train."""
    import torch

    from benchmarks.full_rows import joined
    from benchmarks.trainers import by_pipetune, by_transformers
    from training.config_file import load_config
    from training.pipeline_trainer import PipelineTrainer
    from training.zero_trainer import ZeroTrainer

    dims = {"pipeline": [2, 1], "zero": [1, 2], "trainer": [1, 1]}[kind]
    words = [f"model_topo.process_topology.dims={dims}"]
    words += [f"zero_optimization={json.dumps(TUNED_ZERO)}"] if kind == "zero" else []
    config = load_config(str(folder / "run.yml"), words)
    if kind == "trainer":
        torch.set_num_threads(os.cpu_count() or 1)
        speed = by_transformers(config, read_samples(config, case), STEPS, TRAINER_BATCH)
    else:
        way = PipelineTrainer if kind == "pipeline" else ZeroTrainer
        with joined(config):
            speed = by_pipetune(config, read_samples(config, case), way, STEPS)
    tell(folder, speed)


def read_samples(config: TrainConfig, case: str) -> SampleSet:
    """Real records, or whole rows of the limit."""
    from rich.console import Console

    from benchmarks.full_rows import random_rows
    from training.run_data import RecordReader

    if case == "instructions":
        return RecordReader(config, Path(config.model_path), Console(quiet=True)).read("data", config.data_path)
    return random_rows(LARGE_HEAD["vocab_size"], config.train_batch_size, config.max_seq_len)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--kind", choices=("pipeline", *NAMES), required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.folder, arguments.case, arguments.kind)

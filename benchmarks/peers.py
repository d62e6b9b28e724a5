"""A two-stage pipeline beside ZeRO-3 and transformers' Trainer: a part of `python -m benchmarks.throughput`.

A llama of the width and vocabulary of SmolLM2-135M with 12 layers, where the head is 40 % of the work. All runs train
the same samples in the same steps from random weights with AdamW, on two cores, a step of either in turn
(`benchmarks.turns`); useful tokens are those without padding. The pipeline runs with either schedule, and the faster
one counts.

- `pipeline_vs_zero3`: two processes of one thread either way, through Pipetune's own engines; rows of 256 tokens, a
  global batch of 32, micro-batches of 1, fp32.
- `packed_vs_hf_trainer`: worked maths problems and tool dialogues of `../shared/data` (else the shipped records) of up
  to 1,024 tokens, bf16. Pipetune packs them, as it does by default. The Trainer is one process with both cores, its
  micro-batches of 4 padded to their longest sample by transformers' own collator.
- `full_vs_hf_trainer`: the same for rows of 512 tokens without padding, all of them supervised; a step's 32 rows go
  through the pipeline two at a time, its blocks compiled.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml
from rich.table import Table

from benchmarks.ideal import LARGE_HEAD
from benchmarks.tokenizing import SAMPLES, SHARED, make_tokenizer
from benchmarks.turns import Turn, Turns
from training.schedule.instructions import Schedule

if TYPE_CHECKING:  # the parent process needs no torch
    from data.sample_set import SampleSet
    from training.config.keys import TrainConfig

ROUNDS = 3
TRAINER_BATCH = 4  # samples in a micro-batch of the Trainer; 8 take more padding, and more memory than there is
BF16 = {"bf16": {"enabled": True}}
RECORDS = [str(SHARED / "gsm8k" / "train.jsonl"), str(SHARED / "toolcall" / "*.json")]
CASES: dict[str, dict[str, Any]] = {
    "short": {"max_seq_len": 256, "train_batch_size": 32},
    "instructions": {"max_seq_len": 1024, "train_batch_size": 64, **BF16},
    "full": {"max_seq_len": 512, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "compile": True, **BF16},
}
TUNED_ZERO = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "stage3_prefetch_bucket_size": 50_000_000}
# The figure, its case, the peer, and at least how many times as fast the pipeline should be.
FIGURES = {
    "pipeline_vs_zero3": ("short", "zero", 1.7),
    "packed_vs_hf_trainer": ("instructions", "trainer", 3),
    "full_vs_hf_trainer": ("full", "trainer", 2.2),
}
NAMES = {"zero": "ZeRO-3, two processes", "trainer": "transformers' Trainer, two cores"}


def measure(folder: Path) -> dict[str, Any]:
    """All figures, and the tokens per second behind them."""
    make_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "config.json").write_text(json.dumps(LARGE_HEAD))
    figures: dict[str, Any] = {"peers": {}}
    for name, (case, peer, _) in FIGURES.items():
        (folder / name).mkdir()
        write_config(folder, folder / name / "run.yml", case)
        ways = (*get_args(Schedule), peer)
        with Turns(folder / name) as turns:
            for way in ways:  # the Trainer would take the launcher's variables for a distributed run
                ranks = None if way == "trainer" else 2
                turns.add(way, "benchmarks.peers", ranks, "--case", case, "--way", way)
            turns.rounds(ROUNDS)
        figures["peers"][name] = speeds = {way: turns.speed(way) for way in ways}
        figures[name] = turns.ratio(max(get_args(Schedule), key=speeds.__getitem__), peer)
    return figures


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    made = Table(title="useful tokens/s of two stages with one thread each")
    for column in ("figure", *get_args(Schedule), "peer", "tokens/s", "times as fast", "target"):
        made.add_column(column, justify="left" if column in ("figure", "peer") else "right")
    for name, (_, peer, target) in FIGURES.items():
        speeds = figures["peers"][name]
        ours = (f"{speeds[schedule]:,.0f}" for schedule in get_args(Schedule))
        made.add_row(name, *ours, NAMES[peer], f"{speeds[peer]:,.0f}", f"{figures[name]:.2f}", str(target))
    return made


def write_config(folder: Path, path: Path, case: str) -> None:
    """A run's keys."""
    keys = {
        "model_path": str(folder / "tokenizer"),
        "data_path": RECORDS if SHARED.is_dir() else [str(SAMPLES)],
        "template_fallback": "rewrite",
        "save_path": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "from_scratch": True,
        **CASES[case],
    }
    path.write_text(yaml.safe_dump(keys))


def work(folder: Path, case: str, way: str) -> None:
    """One process of a way to train."""
    import torch

    from benchmarks.steps import joined
    from benchmarks.trainers import by_pipetune, by_transformers
    from training.config.yaml_file import load_config
    from training.engine.pipeline import PipelineTrainer
    from training.engine.zero import ZeroTrainer

    dims = {"zero": [1, 2], "trainer": [1, 1]}.get(way, [2, 1])
    words = [f"model_topo.process_topology.dims={dims}"]
    words += [f"zero_optimization={json.dumps(TUNED_ZERO)}"] if way == "zero" else []
    words += [f"schedule={way}"] if way not in NAMES else []
    config = load_config(str(folder.parent / "run.yml"), words)
    if way == "trainer":
        torch.set_num_threads(os.cpu_count() or 1)
        by_transformers(config, read_samples(config, case), Turn(folder), TRAINER_BATCH)
    else:
        engine = ZeroTrainer if way == "zero" else PipelineTrainer
        with joined(config):
            by_pipetune(config, read_samples(config, case), engine, Turn(folder))


def read_samples(config: TrainConfig, case: str) -> SampleSet:
    """Real records, or whole rows of the limit."""
    from rich.console import Console

    from benchmarks.full_rows import random_rows
    from training.data_setup import RecordReader

    if case == "instructions":
        return RecordReader(config, Path(config.model_path), Console(quiet=True)).read("data", config.data_path)
    return random_rows(LARGE_HEAD["vocab_size"], config.train_batch_size, config.max_seq_len)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--way", choices=(*get_args(Schedule), *NAMES), required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.folder, arguments.case, arguments.way)

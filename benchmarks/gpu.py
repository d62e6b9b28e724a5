"""One GPU: tokens per second and MFU beside transformers' Trainer, plain and with Liger: `python -m benchmarks.gpu`.

Two models in bf16 at 4,096 tokens: a llama of a billion parameters, and as many layers of llama-7b as fit. All ways
train the same full rows with AdamW on one device, one stage, each in a process of its own; the Trainer keeps fp32
weights and computes in bf16 autocast, as its documentation has it. MFU counts what the model needs
(`models.flops`), not what is recomputed. The Liger run is left out where its package is not installed.
Everything together takes less than 8 minutes.

JSON keys: `mfu_1b`, `mfu_7b`, and `gpu` with the tokens per second, the MFU and the peak memory of each run.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml
from rich.table import Table

from benchmarks.parts import run_parts
from benchmarks.ranks import run_ranks, tell
from benchmarks.tokenizing import make_tokenizer

if TYPE_CHECKING:
    from training.config.keys import TrainConfig

LENGTH, BATCH, STEPS = 4096, 8, 5
WAYS = {"pipetune": "Pipetune", "trainer": "transformers' Trainer", "liger": "the Trainer with Liger"}
TARGET = 0.55  # of the 7B shape
BYTES = 18  # per parameter: weight, gradient, fp32 sum, master and two moments
ROOM = 24 * 2**30  # for activations and everything else
COMMON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}


def measure(folder: Path) -> dict[str, Any]:
    """All figures; leaves with a line where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: there is no GPU")
    memory = torch.cuda.get_device_properties(0).total_memory
    figures: dict[str, Any] = {"gpu": {"device": torch.cuda.get_device_name()}}
    make_tokenizer(folder / "model")
    for name, shape in SHAPES.items():
        layers = fitting_layers(shape, memory)
        write_run(folder, shape | {"num_hidden_layers": layers}, length=LENGTH, batch=BATCH)
        ways = [way for way in WAYS if way != "liger" or find_spec("liger_kernel")]
        figures["gpu"][name] = {"layers": layers} | {way: launch(folder, way) for way in ways}
        figures[f"mfu_{name}"] = figures["gpu"][name]["pipetune"]["mfu"]
    return figures


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    about = figures["gpu"]
    made = Table(title=f"{about['device']}, bf16, rows of {LENGTH:,} tokens; target: {TARGET:.0%} MFU at 7b")
    for column in ("model", "layers", "", "tokens/s", "MFU", "peak GB"):
        made.add_column(column, justify="left" if column in ("model", "") else "right")
    for name in SHAPES:
        for way in (way for way in WAYS if way in about[name]):
            found = about[name][way]
            mfu = "-" if found["mfu"] is None else f"{found['mfu']:.1%}"
            peak = f"{found['peak_bytes'] / 1e9:.1f}"
            made.add_row(name, str(about[name]["layers"]), WAYS[way], f"{found['tokens_per_s']:,.0f}", mfu, peak)
    return made


def fitting_layers(shape: dict[str, Any], memory: int) -> int:
    """As many layers as fit with their optimizer's state, at most those of the shape."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    grouped = shape["num_key_value_heads"] / shape["num_attention_heads"]
    layer = hidden * hidden * (2 + 2 * grouped) + 3 * hidden * inner
    ends = 2 * COMMON["vocab_size"] * hidden
    return max(1, min(shape["num_hidden_layers"], int(((memory - ROOM) / BYTES - ends) / layer)))


def write_run(folder: Path, shape: dict[str, Any], length: int, batch: int) -> None:
    """A model's config.json and a run's keys."""
    (folder / "model" / "config.json").write_text(json.dumps(COMMON | shape))
    keys = {
        "model_path": str(folder / "model"),
        "data_path": "",
        "save_path": str(folder / "run"),
        "from_scratch": True,
        "max_seq_len": length,
        "train_batch_size": batch,
        "bf16": {"enabled": True},
        "use_flash_attn": True,
    }
    (folder / "run.yml").write_text(yaml.safe_dump(keys))


def launch(folder: Path, way: str) -> dict[str, Any]:
    """What one way to train reaches."""
    found: dict[str, Any] = run_ranks(1 if way == "pipetune" else None, "benchmarks.gpu", folder, "--way", way)
    return found


def work(folder: Path, way: str) -> None:
    """The process that trains."""
    import torch

    from benchmarks.full_rows import random_rows
    from benchmarks.steps import joined
    from benchmarks.trainers import by_pipetune, by_transformers
    from benchmarks.turns import Straight
    from models.spec import ModelSpec
    from training.config.deepspeed_config import training_dtype
    from training.config.yaml_file import load_config
    from training.engine.pipeline import PipelineTrainer
    from training.metrics.utilization import Utilization

    config: TrainConfig = load_config(str(folder / "run.yml"), [])
    spec = ModelSpec.from_folder(Path(config.model_path))
    samples = random_rows(int(spec.config.vocab_size), config.train_batch_size, config.max_seq_len)
    pace = Straight(STEPS + 1)
    if way == "pipetune":
        with joined(config):
            by_pipetune(config, samples, PipelineTrainer, pace)
    else:
        by_transformers(config, samples, pace, micro_batch=1, liger=way == "liger")
    speed = median(pace.speeds[1:])
    seconds = config.train_batch_size * config.max_seq_len / speed
    lengths = [config.max_seq_len] * config.train_batch_size
    supervised = config.train_batch_size * (config.max_seq_len - 1)
    found = {
        "tokens_per_s": speed,
        "mfu": Utilization(spec, training_dtype(config), 1)(lengths, supervised, seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }
    tell(folder, found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--local_rank", type=int)
    arguments, _ = parser.parse_known_args()
    if arguments.way:
        work(arguments.folder, arguments.way)
    else:
        run_parts("Speed of one GPU beside transformers' Trainer.", {"gpu": sys.modules[__name__]})

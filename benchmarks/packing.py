"""What packing saves: a part of `python -m benchmarks.data`.

Worked maths problems and tool dialogues of `../shared/data` where it is there, else the shipped records.

- `packing_efficiency`: tokens kept over tokens in the rows, whole epochs packed into rows of 2,048 tokens.
- `packing_efficiency_batch`: the same for batches of 128 samples, each micro-batch as long as its longest row.
- `packed_vs_padded`, `packed_vs_padded_2048`: useful tokens per second in training, packed as by default against every
  sample padded to `max_seq_len` (1,024 and 2,048), the recipe that Pipetune began with. One process with all cores
  trains the same model on the same batch in turn; the fastest steps count.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.table import Table

from benchmarks.parts import against_targets
from benchmarks.ranks import run_ranks, tell
from benchmarks.tokenizing import SAMPLES, SHARED, make_tokenizer

if TYPE_CHECKING:  # the parent process needs no torch
    from data.loader import Loader

LIMITS = {1024: "packed_vs_padded", 2048: "packed_vs_padded_2048"}
BATCH = 128  # samples, for the efficiency
TRAINED = 16  # samples in a step
STEPS = 2
MODEL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TARGETS = {
    "packing_efficiency": "at least 0.98",
    "packing_efficiency_batch": "at least 0.93",
    "packed_vs_padded": "at least 4",
    "packed_vs_padded_2048": "at least 8",
}


def measure(folder: Path) -> dict[str, Any]:
    """All figures.

    Args:
        folder: where to work.
    """
    make_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "config.json").write_text(json.dumps(MODEL))
    figures: dict[str, Any] = {"packing": {}}
    for limit, name in LIMITS.items():
        (folder / "run.yml").write_text(yaml.safe_dump(config(folder, limit)))
        found = run_ranks(1, "benchmarks.packing", folder)
        figures[name] = found["packed_tokens_per_s"] / found["padded_tokens_per_s"]
        figures["packing"][str(limit)] = found
    return figures | {name: found[name] for name in ("packing_efficiency", "packing_efficiency_batch")}


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    about = figures["packing"][str(max(LIMITS))]
    made = against_targets(
        f"packing {about['samples']:,} samples of {about['mean']:.0f} tokens on average", figures, TARGETS
    )
    for limit in LIMITS:
        found = figures["packing"][str(limit)]
        for kind in ("packed", "padded"):
            made.add_row(f"{kind}, limit {limit:,}", f"{found[f'{kind}_tokens_per_s']:,.0f} tokens/s", "")
    return made


def config(folder: Path, limit: int) -> dict[str, Any]:
    """A run's keys."""
    real = [str(SHARED / "gsm8k" / "train.jsonl"), str(SHARED / "toolcall" / "*.json")]
    return {
        "model_path": str(folder / "tokenizer"),
        "data_path": real if SHARED.is_dir() else [str(SAMPLES)],
        "template_fallback": "rewrite",
        "save_path": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "from_scratch": True,
        "max_seq_len": limit,
        "train_batch_size": TRAINED,
        "bf16": {"enabled": True},
    }


def work(folder: Path) -> None:
    """The rank that trains."""
    from rich.console import Console

    from benchmarks.steps import joined
    from data.loader import Loader
    from models.api import read_spec
    from training.config.yaml_file import load_config
    from training.data_setup import RecordReader, build_loader
    from training.engine.pipeline import PipelineTrainer
    from training.plan.auto import divide

    class Padded(Loader):
        """Each sample in a row of `max_seq_len`."""

        def _shape(self, rows: list[list[int]]) -> tuple[int, int]:
            return max(len(rows), 1), limit

    settings = load_config(str(folder / "run.yml"), [])
    limit, model = settings.max_seq_len, folder / "tokenizer"
    with joined(settings):
        data = RecordReader(settings, model, Console(quiet=True)).read("data", settings.data_path)
        epoch = Loader(data, BATCH, 1, 1, seed=0, packing="dataset", row_length=limit)
        batches = Loader(data, BATCH, 1, 1, seed=0, packing="batch", row_length=limit)
        packed = build_loader(data, settings)
        loaders: dict[str, Loader] = {"packed": packed, "padded": Padded(data, TRAINED, 1, 1, settings.seed)}
        spec = read_spec(model)
        trainer = PipelineTrainer.build(settings, spec, model, divide(settings, spec))
        speeds = dict.fromkeys(loaders, 0.0)
        for _ in range(STEPS):
            for name, loader in loaders.items():
                batch = loader.batch(0)
                begin = time.perf_counter()
                trainer.train_step(loader, batch)
                speeds[name] = max(speeds[name], batch.tokens / (time.perf_counter() - begin))
    found = {
        "packing_efficiency": int(data.lengths.sum()) / (epoch.rows_per_epoch * limit),
        "packing_efficiency_batch": batches.efficiency(),
        **{f"{name}_tokens_per_s": speed for name, speed in speeds.items()},
        "samples": len(data),
        "mean": float(data.lengths.mean()),
        "row_length": packed.row_length,
    }
    tell(folder, found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    work(parser.parse_args().folder)

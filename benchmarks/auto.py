"""`--auto` against configs by hand: a part of `python -m benchmarks.throughput`.

A llama of SmolLM2-135M's width with 6 blocks and 32,000 words is to be trained on worked maths problems and tool
dialogues of `../shared/data` (else the shipped records), 16 samples of up to 512 tokens a step. `train_ds.py --auto
--dry-run` chooses how; `HAND_MADE` has ten configs that somebody might write for two cores. All of them take the same
samples. Their processes wait beside each other, a few configs and what `--auto` chose at a time, and take their steps
in turn (`benchmarks.turns`); each is compared with the steps of `--auto` that ran beside its own. It takes six minutes
and 10 GB of memory.

- `auto_vs_best_hand`: how many times as fast the choice is as the best by hand; 0.9 is the least it should be.
- `auto_tokens_per_s`: its speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from benchmarks.peers import RECORDS
from benchmarks.ranks import ROOT, environment
from benchmarks.tokenizing import SAMPLES, SHARED, make_tokenizer
from benchmarks.turns import Turn, Turns

ROUNDS = 5
TOGETHER = 3  # configs by hand that wait beside what --auto chose: more would take more memory than there is
AUTO = "auto"
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
GIVEN = ("from_scratch=true", "template_fallback=rewrite", "train_batch_size=16", "max_seq_len=512")
ALIKE = "model_path data_path save_path cache_dir from_scratch template_fallback train_batch_size max_seq_len".split()
ALIKE += ["eval_share"]
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def of(stages: int, replicas: int, rows: int = 1, **keys: Any) -> dict[str, Any]:
    """Keys of a config by hand; in bf16, which this CPU may have instructions for, where they do not say otherwise."""
    topology = {"model_topo": {"process_topology": {"dims": [stages, replicas]}}}
    return BF16 | topology | {"train_micro_batch_size_per_gpu": rows} | keys


HAND_MADE: dict[str, dict[str, Any]] = {
    "one process": of(1, 1),
    "two stages": of(2, 1),
    "two replicas": of(1, 2),
    "one process, 4 rows": of(1, 1, rows=4),
    "two stages, 2 rows": of(2, 1, rows=2),
    "two replicas, 4 rows": of(1, 2, rows=4),
    "one process, 4 rows, padded": of(1, 1, rows=4, packing=False),
    "two stages, dualpipev": of(2, 1, schedule="dualpipev"),
    "one process, compiled": of(1, 1, compile=True),
    "two replicas, fp32": of(1, 2, bf16={}),
}


def measure(folder: Path) -> dict[str, Any]:
    """What was chosen, and how it compares with each config by hand."""
    chosen = choose(folder)
    ways, alike = list(HAND_MADE), {key: chosen[key] for key in ALIKE if key in chosen}
    ratios: dict[str, float] = {}
    speeds: dict[str, list[float]] = {AUTO: []}
    for begin in range(0, len(ways), TOGETHER):
        beside = ways[begin : begin + TOGETHER]
        place = folder / f"turns-{begin}"
        with Turns(place) as turns:
            for name in (AUTO, *beside):
                keys = chosen if name == AUTO else alike | HAND_MADE[name]
                path = folder / f"{name}.yml"
                path.write_text(yaml.safe_dump(keys), encoding="utf-8")
                stages, replicas = keys["model_topo"]["process_topology"]["dims"]
                turns.add(name, "benchmarks.auto", stages * replicas, "--config", str(path))
            turns.rounds(ROUNDS)
        told = {name: f"{turns.ratio(AUTO, name):.2f}" for name in beside}
        print(f"--auto, times as fast as: {told}", file=sys.stderr, flush=True)  # a long measurement may be cut short
        speeds[AUTO].append(turns.speed(AUTO))
        speeds |= {name: [turns.speed(name)] for name in beside}
        ratios |= {name: turns.ratio(AUTO, name) for name in beside}
    return {
        "auto_vs_best_hand": min(ratios.values()),
        "auto_tokens_per_s": statistics.median(speeds[AUTO]),
        "auto_vs_hand": ratios,
        "tokens_per_s_by_hand": {name: speeds[name][0] for name in ways},
        "auto_chose": {key: chosen[key] for key in chosen if key not in ALIKE},
    }


def choose(folder: Path) -> dict[str, Any]:
    """The config that `--auto` writes for the model and the records."""
    model, run = folder / "model", folder / "run"
    make_tokenizer(model)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    records = RECORDS if SHARED.is_dir() else [str(SAMPLES)]
    words = ["--auto", "--model", str(model), "--save", str(run), "--dry-run", "--data", *records]
    command = [sys.executable, str(ROOT / "train_ds.py"), *words, *GIVEN, f"cache_dir={folder / 'cache'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = yaml.safe_load((run / "auto.yml").read_text(encoding="utf-8"))
    return found


def table(figures: dict[str, Any]) -> Table:
    """Each config by hand beside the choice."""
    chosen = figures["auto_chose"]
    dims, rows = chosen["model_topo"]["process_topology"]["dims"], chosen["train_micro_batch_size_per_gpu"]
    told = f"dims {dims}, {rows} rows, {figures['auto_tokens_per_s']:,.0f} tokens/s"
    best = f"{figures['auto_vs_best_hand']:.2f} times as fast as the best by hand; at least 0.9 is wanted"
    made = Table(title=f"--auto chose {told}", caption=best)
    for heading in ("config by hand", "tokens/s", "--auto beside it, times as fast"):
        made.add_column(heading, justify="left" if heading == "config by hand" else "right")
    for name, ratio in figures["auto_vs_hand"].items():
        made.add_row(name, f"{figures['tokens_per_s_by_hand'][name]:,.0f}", f"{ratio:.2f}")
    return made


def work(path: Path, folder: Path) -> None:
    """One rank's work."""
    from rich.console import Console

    from benchmarks.steps import joined
    from benchmarks.trainers import by_pipetune
    from data.tokenized.dataset import Dataset
    from training.config.yaml_file import load_config
    from training.data_setup import RecordReader
    from training.engine.pipeline import PipelineTrainer

    config = load_config(path)
    with joined(config):
        samples, _ = RecordReader(config, Path(config.model_path), Console(quiet=True)).read_sets()
        assert isinstance(samples, Dataset)
        by_pipetune(config, samples, PipelineTrainer, Turn(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.config, arguments.folder)

"""How near a pipeline comes to the ideal: a part of `python -m benchmarks.throughput`.

The same model, batch and optimizer run through Pipetune's own engine: one process with one thread, one process with two
threads, and two stages with one thread each. With m micro-batches and p stages a pipeline without any cost of its own
would reach m / (m + p - 1) x p times the one-thread speed.

- `pipeline_vs_ideal`: the share of that which is measured, for a model that divides into two equal halves.
- `pipeline_vs_ideal_large_head`: the same for a model whose head, undivided, is 40 % of its work (the width and the
  vocabulary of SmolLM2-135M); `parts: auto` divides it.
- `dualpipev_vs_ideal`, `dualpipev_vs_ideal_large_head`: `schedule: dualpipev` beside that ideal, which counts the
  bubble of 1f1b: without one, 1.06 would be the whole.
- `startup_s`: the time from the command to the first step of the two stages.

All settings take their steps in turn (`benchmarks.turns`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.turns import Turn, Turns
from training.instructions import Schedule

STAGES, MICRO_BATCHES = 2, 16
LENGTH = 512
VOCABULARY = 1024
ROUNDS = 5
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
LARGE_HEAD: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Shape:
    """A model and the length of its rows."""

    key: str
    model: dict[str, Any]
    length: int


@dataclass(frozen=True)
class Setting:
    """One way to run the model."""

    key: str
    name: str
    stages: int
    threads: int
    schedule: Schedule = "1f1b"


SHAPES = (Shape("pipeline_vs_ideal", MODEL, LENGTH), Shape("pipeline_vs_ideal_large_head", LARGE_HEAD, 256))
SETTINGS = (
    Setting("one_thread", "one process, one thread", stages=1, threads=1),
    Setting("two_threads", "one process, two threads", stages=1, threads=2),
    Setting("pipeline", "two stages, one thread each", stages=STAGES, threads=1),
    Setting("folded", "the same with dualpipev", stages=STAGES, threads=1, schedule="dualpipev"),
)


def measure(folder: Path) -> dict[str, Any]:
    """Tokens per second of each setting, the share of the ideal, and the time to start."""
    figures: dict[str, Any] = {"tokens_per_s": {}}
    for shape in SHAPES:
        place = folder / shape.key
        place.mkdir()
        (place / "config.json").write_text(json.dumps(shape.model), encoding="utf-8")
        with Turns(place) as turns:
            for setting in SETTINGS:
                words = ("--setting", json.dumps(asdict(setting)), "--length", str(shape.length))
                seconds = turns.add(setting.key, "benchmarks.ideal", setting.stages, *words)
                if setting.key == "pipeline":
                    figures["startup_s"] = seconds
            turns.rounds(ROUNDS)
        ideal = MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1) * STAGES
        speeds = {setting.key: turns.speed(setting.key) for setting in SETTINGS}
        figures["tokens_per_s"][shape.key] = speeds | {"ideal": ideal * speeds["one_thread"]}
        figures[shape.key] = turns.ratio("pipeline", "one_thread") / ideal
        figures[f"dualpipev_{shape.key.removeprefix('pipeline_')}"] = turns.ratio("folded", "one_thread") / ideal
    return figures


def table(figures: dict[str, Any]) -> Table:
    """The speeds for people."""
    start = f"{figures['startup_s']:.1f} s from the command to the first step of two stages"
    made = Table(title=f"tokens/s, {MICRO_BATCHES} micro-batches", caption=start)
    made.add_column("setting")
    names = {setting.key: setting.name for setting in SETTINGS} | {"ideal": "the ideal of two stages"}
    for heading in ("equal halves", "large head"):
        made.add_column(heading, justify="right")
        made.add_column("of the ideal", justify="right")
    for key, name in names.items():
        cells = []
        for shape in SHAPES:
            speeds = figures["tokens_per_s"][shape.key]
            cells += [f"{speeds[key]:,.0f}", f"{speeds[key] / speeds['ideal']:.3f}"]
        made.add_row(name, *cells)
    return made


def work(setting: Setting, length: int, folder: Path) -> None:
    """One rank's work."""
    import torch

    from benchmarks.full_rows import joined, rows_loader, run_config, train
    from models.spec import ModelSpec
    from training.pipeline_trainer import PipelineTrainer

    model = folder.parent
    config = run_config(model, setting.stages, MICRO_BATCHES, length, schedule=setting.schedule)
    with joined(config):
        torch.set_num_threads(setting.threads)
        spec = ModelSpec.from_folder(model)
        trainer = PipelineTrainer.build(config, spec, model, total_steps=ROUNDS + 1)
        train(trainer, rows_loader(config, spec.config.vocab_size), Turn(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", type=json.loads, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(Setting(**arguments.setting), arguments.length, arguments.folder)

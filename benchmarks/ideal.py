"""How near a pipeline comes to the ideal: a part of `python -m benchmarks.throughput`.

The same model, batch and optimizer run through Pipetune's own engine: one process with one thread, one process with two
threads, and two stages with one thread each. With m micro-batches and p stages a pipeline without any cost of its own
would reach m / (m + p - 1) x p times the one-thread speed, if a core were as fast while the other one works. It is not,
as they share the memory; how much that takes is told by two processes that train a model each, at the same time.

- `pipeline_vs_ideal`: the share of that which is measured, for a model that divides into two equal halves.
- `pipeline_vs_ideal_large_head`: the same for a model whose head, undivided, is 40 % of its work (the width and the
  vocabulary of SmolLM2-135M); `parts: auto` divides it.
- `dualpipev_vs_ideal`, `dualpipev_vs_ideal_large_head`: `schedule: dualpipev` beside that ideal, which counts the
  bubble of 1f1b: without one, 1.06 would be the whole.
- `two_copies_vs_twice`, `two_copies_vs_twice_large_head`: the speed of two such processes together, against twice that
  of one; what no division of the work over these cores can be expected to pass.
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
from training.schedule.instructions import Schedule

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

    name: str
    suffix: str  # of its figures' names
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
    beside: bool = False  # together with the setting before


SHAPES = (Shape("equal halves", "", MODEL, LENGTH), Shape("large head", "_large_head", LARGE_HEAD, 256))
SETTINGS = (
    Setting("one_thread", "one process, one thread", stages=1, threads=1),
    Setting("pipeline", "two stages, one thread each", stages=STAGES, threads=1),
    Setting("dualpipev", "the same with dualpipev", stages=STAGES, threads=1, schedule="dualpipev"),
    Setting("copy", "two processes with a model each: one", stages=1, threads=1),
    Setting("other_copy", "two processes with a model each: the other", stages=1, threads=1, beside=True),
    Setting("two_threads", "one process, two threads", stages=1, threads=2),
)


def measure(folder: Path) -> dict[str, Any]:
    """Tokens per second of each setting, the share of the ideal, and the time to start."""
    figures: dict[str, Any] = {"tokens_per_s": {}}
    for shape in SHAPES:
        place = folder / f"model{shape.suffix}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(shape.model), encoding="utf-8")
        with Turns(place) as turns:
            for setting in SETTINGS:
                words = ("--setting", json.dumps(asdict(setting)), "--length", str(shape.length))
                seconds = turns.add(setting.key, "benchmarks.ideal", setting.stages, *words, beside=setting.beside)
                if setting.key == "pipeline":
                    figures["startup_s"] = seconds
            turns.rounds(ROUNDS)
        ideal = MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1) * STAGES
        speeds = {setting.key: turns.speed(setting.key) for setting in SETTINGS}
        figures["tokens_per_s"][shape.name] = speeds | {"ideal": ideal * speeds["one_thread"]}
        figures[f"pipeline_vs_ideal{shape.suffix}"] = turns.ratio("pipeline", "one_thread") / ideal
        figures[f"dualpipev_vs_ideal{shape.suffix}"] = turns.ratio("dualpipev", "one_thread") / ideal
        copies = (turns.ratio(name, "one_thread") for name in ("copy", "other_copy"))
        figures[f"two_copies_vs_twice{shape.suffix}"] = sum(copies) / 2
    return figures


def table(figures: dict[str, Any]) -> Table:
    """The speeds for people."""
    start = f"{figures['startup_s']:.1f} s from the command to the first step of two stages"
    made = Table(title=f"tokens/s, {MICRO_BATCHES} micro-batches", caption=start)
    made.add_column("setting")
    names = {setting.key: setting.name for setting in SETTINGS} | {"ideal": "the ideal of two stages"}
    for shape in SHAPES:
        made.add_column(shape.name, justify="right")
        made.add_column("of the ideal", justify="right")
    for key, name in names.items():
        cells = []
        for shape in SHAPES:
            speeds = figures["tokens_per_s"][shape.name]
            cells += [f"{speeds[key]:,.0f}", f"{speeds[key] / speeds['ideal']:.3f}"]
        made.add_row(name, *cells)
    return made


def work(setting: Setting, length: int, folder: Path) -> None:
    """One rank's work."""
    import torch

    from benchmarks.full_rows import rows_loader, run_config
    from benchmarks.steps import joined, train
    from models.api import read_spec
    from training.engine.pipeline import PipelineTrainer
    from training.plan.auto import divide

    model = folder.parent
    keys = {"schedule": setting.schedule, "zero_optimization": {"stage": 0}}  # all have to fit into memory at once
    config = run_config(model, setting.stages, MICRO_BATCHES, length, **keys)
    with joined(config):
        torch.set_num_threads(setting.threads)
        spec = read_spec(model)
        trainer = PipelineTrainer.build(config, spec, model, divide(config, spec))
        train(trainer, rows_loader(config, spec.config.vocab_size), Turn(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", type=json.loads, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(Setting(**arguments.setting), arguments.length, arguments.folder)

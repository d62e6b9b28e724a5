"""`parts: auto` against every division by hand: a part of `python -m benchmarks.throughput`.

A llama whose head and embedding, with 49,152 words, are two fifths of its work is trained in two stages of one thread
each: divided evenly, with a block more or less on either side of what `auto` came to, and by `auto` itself, with
estimated costs and with costs measured by `--calibrate`. All divisions take their steps in turn (`benchmarks.turns`).

- `auto_vs_best_hand`: how many times as fast the division by estimated costs, the default, is as the best of the
  others: at least 1 where nobody finds a better one, but for the noise of the machine.
- `calibrated_vs_best_hand`: the same for the division by measured costs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.ideal import LARGE_HEAD
from benchmarks.turns import Turn, Turns

if TYPE_CHECKING:  # the parent process reads the config later
    from training.config.keys import TrainConfig

LENGTH, MICRO_BATCHES = 256, 8
ROUNDS = 5
LAYERS = LARGE_HEAD["num_hidden_layers"] + 2


def measure(folder: Path) -> dict[str, Any]:
    """Seconds of a step by division, what `auto` came to, and the ratio."""
    from models.spec import ModelSpec
    from training.metrics.devices import this_device
    from training.plan.inputs import Basis, Workload
    from training.plan.plan import best_parts
    from training.plan.timing import calibrate

    (folder / "config.json").write_text(json.dumps(LARGE_HEAD), encoding="utf-8")
    config, spec = division_config(folder), ModelSpec.from_folder(folder)
    workload = Workload.assumed(config)
    basis = Basis(config, spec, workload, this_device())
    estimated = best_parts(basis)
    calibrated = best_parts(Basis(config, spec, workload, this_device(), calibrate(config, spec, workload)))
    tried = {LAYERS // 2, *(first + step for first in (estimated[0], calibrated[0]) for step in (-1, 0, 1))}
    divisions = sorted([first, LAYERS - first] for first in tried if 0 < first < LAYERS)
    with Turns(folder) as turns:
        for parts in divisions:
            turns.add(str(parts), "benchmarks.division", 2, "--parts", json.dumps(parts))
        turns.rounds(ROUNDS)

    def against_the_others(auto: list[int]) -> float:
        return min(turns.ratio(str(auto), str(parts)) for parts in divisions if parts != auto)

    return {
        "auto_vs_best_hand": against_the_others(estimated),
        "calibrated_vs_best_hand": against_the_others(calibrated),
        "auto_estimated": estimated,
        "auto_calibrated": calibrated,
        "seconds_by_parts": {str(parts): turns.seconds(str(parts)) for parts in divisions},
    }


def table(figures: dict[str, Any]) -> Table:
    """Each division's step."""
    made = Table(title=f"a step of {MICRO_BATCHES} micro-batches of {LENGTH} tokens")
    for heading in ("parts", "", "seconds"):
        made.add_column(heading, justify="right")
    names = {str(figures["auto_estimated"]): "auto, estimated"}
    names[str(figures["auto_calibrated"])] = (
        "auto" if figures["auto_calibrated"] == figures["auto_estimated"] else "auto, calibrated"
    )
    for parts, seconds in figures["seconds_by_parts"].items():
        made.add_row(parts, names.get(parts, ""), f"{seconds:.2f}")
    return made


def division_config(model: Path, parts: list[int] | None = None) -> TrainConfig:
    """The config of one division; without ZeRO, so that all of them fit into memory at once."""
    from benchmarks.full_rows import run_config

    return run_config(model, 2, MICRO_BATCHES, LENGTH, parts=parts, zero_optimization={"stage": 0})


def work(parts: list[int], folder: Path) -> None:
    """One rank's work."""
    from benchmarks.full_rows import rows_loader
    from benchmarks.steps import joined, train
    from models.spec import ModelSpec
    from training.engine.pipeline import PipelineTrainer
    from training.plan.auto import divide

    model = folder.parent
    config = division_config(model, parts)
    with joined(config):
        spec = ModelSpec.from_folder(model)
        trainer = PipelineTrainer.build(config, spec, model, divide(config, spec))
        train(trainer, rows_loader(config, LARGE_HEAD["vocab_size"]), Turn(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", type=json.loads, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.parts, arguments.folder)

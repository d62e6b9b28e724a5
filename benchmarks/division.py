"""`parts: auto` against every division by hand: a part of `python -m benchmarks.throughput`.

A llama whose head and embedding, with 49,152 words, are two fifths of its work is trained in two stages of one thread
each: divided evenly, with a block more or less on either side of what `auto` came to, and by `auto` itself, with
estimated costs and with costs measured by `--calibrate`. The divisions run in turn, several times, and the fastest step
of each counts. `auto_vs_best_hand` is the time of the fastest division other than auto's over that of `auto`: at least
1 where nobody finds a better one, but for the noise of the machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.ideal import LARGE_HEAD
from benchmarks.ranks import run_ranks, tell

LENGTH, MICRO_BATCHES = 256, 8
ROUNDS, STEPS = 2, 2
LAYERS = LARGE_HEAD["num_hidden_layers"] + 2


def measure(folder: Path) -> dict[str, Any]:
    """Seconds of a step by division, what `auto` came to, and the ratio."""
    from benchmarks.full_rows import run_config
    from models.spec import ModelSpec
    from training.plan.calibration import calibrate
    from training.plan.devices import this_device
    from training.plan.parts import Basis, best_parts
    from training.plan.workload import Workload

    (folder / "config.json").write_text(json.dumps(LARGE_HEAD), encoding="utf-8")
    config, spec = run_config(folder, 2, MICRO_BATCHES, LENGTH), ModelSpec.from_folder(folder)
    workload = Workload.assumed(config)
    basis = Basis(config, spec, workload, this_device())
    estimated = best_parts(basis)
    calibrated = best_parts(Basis(config, spec, workload, this_device(), calibrate(config, spec, workload)))
    tried = {LAYERS // 2, *(first + step for first in (estimated[0], calibrated[0]) for step in (-1, 0, 1))}
    divisions = sorted([first, LAYERS - first] for first in tried if 0 < first < LAYERS)
    seconds = {str(parts): float("inf") for parts in divisions}
    for _ in range(ROUNDS):
        for parts in divisions:
            step = run_ranks(2, "benchmarks.division", folder, "--parts", json.dumps(parts))
            seconds[str(parts)] = min(seconds[str(parts)], step)
    by_hand = min(value for parts, value in seconds.items() if parts != str(calibrated))
    return {
        "auto_vs_best_hand": by_hand / seconds[str(calibrated)],
        "auto_estimated": estimated,
        "auto_calibrated": calibrated,
        "seconds_by_parts": seconds,
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


def work(parts: list[int], folder: Path) -> None:
    """One rank's work: a step to warm up, then the fastest of `STEPS` steps."""
    from benchmarks.full_rows import fastest_step, joined, rows_loader, run_config
    from models.spec import ModelSpec
    from training.pipeline_trainer import PipelineTrainer

    config = run_config(folder, 2, MICRO_BATCHES, LENGTH, parts=parts)
    with joined(config):
        trainer = PipelineTrainer.build(config, ModelSpec.from_folder(folder), folder, total_steps=STEPS + 1)
        tell(folder, fastest_step(trainer, rows_loader(config, LARGE_HEAD["vocab_size"]), STEPS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", type=json.loads, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.parts, arguments.folder)

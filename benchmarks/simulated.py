"""The schedules at more stages than this machine has cores: a part of `python -m benchmarks.throughput`.

First the simulator is held to a measurement: two stages of one thread each record a timeline with either schedule, and
the step that the simulator makes of the mean times is set against the step that was measured, the fastest of five. Then
stages of the same work are simulated in larger numbers, with two and four micro-batches a stage. Both schedules divide
the same work: a rank of dualpipev holds two halves of what a stage of 1f1b does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ideal import LENGTH, MODEL, VOCABULARY
from benchmarks.ranks import run_ranks, tell
from training.schedule.instructions import Schedule
from training.schedule.simulation import simulate

MICRO_BATCHES = 8
PARTS: dict[Schedule, list[int]] = {"1f1b": [7, 7], "dualpipev": [4, 3, 3, 4]}
STEPS = 5  # recorded, after one to warm up
STAGES = (2, 4, 8, 16)
PER_STAGE = (2, 4)  # micro-batches


def measure(folder: Path) -> dict[str, Any]:
    """Simulated steps over measured ones at two stages, and the simulated steps of more."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    ratio: dict[str, float] = {}
    for schedule in PARTS:
        fastest = run_ranks(2, "benchmarks.simulated", folder, "--schedule", schedule)
        passes, transfer = fastest["passes"], fastest["transfer"]
        times = passes["forward"], passes["backward"], MICRO_BATCHES, transfer, passes.get("weights")
        ratio[schedule] = simulate(schedule, *times).seconds / fastest["seconds"]
        if schedule == "1f1b":
            forward, backward = (sum(passes[kind]) / 2 for kind in ("forward", "backward"))
            of_a_message = transfer
    rows = [compare(stages, stages * each, forward, backward, of_a_message) for stages in STAGES for each in PER_STAGE]
    return {
        "simulated_vs_measured": ratio,
        "stage_seconds": {"forward": forward, "backward": backward, "transfer": of_a_message},
        "simulated": rows,
    }


def compare(stages: int, micro_batches: int, forward: float, backward: float, transfer: float) -> dict[str, Any]:
    """Both schedules on `stages` equal ranks that need `forward` and `backward` seconds for a micro-batch."""
    plain = simulate("1f1b", [forward] * stages, [backward] * stages, micro_batches, transfer)
    halves = [forward / 2] * 2 * stages, [backward / 2] * 2 * stages
    dual = simulate("dualpipev", *halves, micro_batches, transfer)
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "seconds": {"1f1b": plain.seconds, "dualpipev": dual.seconds},
        "bubble": {"1f1b": plain.bubble, "dualpipev": dual.bubble},
        "dualpipev_vs_1f1b": plain.seconds / dual.seconds,
    }


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    ratio = ", ".join(f"{name} {value:.3f}" for name, value in figures["simulated_vs_measured"].items())
    made = Table(title="simulated steps", caption=f"simulated / measured at 2 stages: {ratio}")
    for column in ("stages", "micro-batches", "1f1b, s", "bubble", "dualpipev, s", "bubble", "dualpipev over 1f1b"):
        made.add_column(column, justify="right")
    for row in figures["simulated"]:
        numbers = [str(row["stages"]), str(row["micro_batches"])]
        for schedule in PARTS:
            numbers += [f"{row['seconds'][schedule]:.3f}", f"{row['bubble'][schedule]:.1%}"]
        made.add_row(*numbers, f"{row['dualpipev_vs_1f1b']:.3f}")
    return made


def work(schedule: Schedule, folder: Path) -> None:
    """One rank's work: a step to warm up, then recorded ones."""
    import torch

    from benchmarks.full_rows import rows_loader, run_config
    from benchmarks.steps import joined
    from models.api import read_spec
    from training.engine.pipeline import PipelineTrainer
    from training.plan.auto import divide
    from training.profiler.figures import Figures
    from training.profiler.session import Timeline

    config = run_config(folder, 2, MICRO_BATCHES, LENGTH, schedule=schedule, parts=PARTS[schedule])
    with joined(config):
        torch.set_num_threads(1)
        loader, spec = rows_loader(config, VOCABULARY), read_spec(folder)
        trainer = PipelineTrainer.build(config, spec, folder, divide(config, spec))
        timeline = Timeline((2, STEPS + 1), trainer, PARTS[schedule], folder, Console(quiet=True))
        for step in range(1, STEPS + 2):
            batch = loader.batch(step - 1)
            with timeline.step(step):
                trainer.train_step(loader, batch)
        timeline.finish()
        if timeline.spans:
            steps = (Figures.of([rows], ranks=2) for rows in timeline.spans.values())
            fastest = min(steps, key=lambda figures: figures.seconds)
            tell(folder, asdict(fastest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=list(PARTS), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.schedule, arguments.folder)

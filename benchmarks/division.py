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
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.ideal import LARGE_HEAD
from benchmarks.ranks import run_ranks

LENGTH, MICRO_BATCHES = 256, 8
ROUNDS, STEPS = 2, 2
LAYERS = LARGE_HEAD["num_hidden_layers"] + 2


def measure(folder: Path) -> dict[str, Any]:
    """Seconds of a step by division, what `auto` came to, and the ratio."""
    from models.spec import ModelSpec
    from training.plan.calibration import calibrate
    from training.plan.devices import this_device
    from training.plan.parts import Basis, best_parts
    from training.plan.workload import Workload

    (folder / "config.json").write_text(json.dumps(LARGE_HEAD), encoding="utf-8")
    config, spec = run_config(folder, None), ModelSpec.from_folder(folder)
    workload = Workload.assumed(config)
    basis = Basis(config, spec, workload, this_device())
    estimated = best_parts(basis)
    calibrated = best_parts(Basis(config, spec, workload, this_device(), calibrate(config, spec, workload)))
    tried = {LAYERS // 2, *(first + step for first in (estimated[0], calibrated[0]) for step in (-1, 0, 1))}
    divisions = sorted([first, LAYERS - first] for first in tried if 0 < first < LAYERS)
    seconds = {str(parts): float("inf") for parts in divisions}
    for _ in range(ROUNDS):
        for parts in divisions:
            run_ranks(2, "benchmarks.division", "--parts", json.dumps(parts), "--folder", str(folder))
            step = json.loads((folder / "result.json").read_text(encoding="utf-8"))
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


def run_config(folder: Path, parts: list[int] | None) -> Any:
    """The config of a run with these parts."""
    from training.config import TrainConfig

    return TrainConfig.model_validate(
        {
            "model_path": str(folder),
            "data_path": "",
            "save_path": str(folder),
            "from_scratch": True,
            "max_seq_len": LENGTH,
            "train_batch_size": MICRO_BATCHES,
            "model_topo": {"process_topology": {"dims": [2, 1]}, "parts": parts},
        }
    )


def work(parts: list[int], folder: Path) -> None:
    """One rank's work: a step to warm up, then the fastest of `STEPS` steps."""
    import torch

    from data.loader import Loader
    from data.sample_set import InMemory
    from models.spec import ModelSpec
    from training import distributed
    from training.pipeline_trainer import PipelineTrainer

    config = run_config(folder, parts)
    place = distributed.Place.from_environment()
    assert place is not None
    distributed.start(place, config.model_topo)
    spec = ModelSpec.from_folder(folder)
    ids = torch.randint(0, spec.config.vocab_size, (MICRO_BATCHES, LENGTH)).tolist()
    loader = Loader(InMemory([{"input_ids": row, "labels": row} for row in ids]), MICRO_BATCHES, 1, 1, seed=0)
    trainer = PipelineTrainer.build(config, spec, folder, total_steps=STEPS + 1)
    seconds = []
    for step in range(STEPS + 1):
        begin = time.perf_counter()
        trainer.train_step(loader, loader.batch(step))
        seconds.append(time.perf_counter() - begin)
    if place.rank == 0:
        (folder / "result.json").write_text(json.dumps(min(seconds[1:])), encoding="utf-8")
    distributed.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", type=json.loads, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    work(arguments.parts, arguments.folder)

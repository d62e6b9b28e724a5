"""Speed of a pipeline on two cores, and what its checkpoints cost: `python -m benchmarks.throughput`.

How much of the ideal speed-up do two stages reach? (`benchmarks.checkpoints` is the other half.)

The same model, batch and optimizer run three times through Pipetune's own engine: one process with one thread, one
process with two threads, and two stages with one thread each. With m micro-batches and p stages a pipeline without
any cost of its own would reach m / (m + p - 1) x p times the one-thread speed; `pipeline_vs_ideal` is the share of
that which is measured. `startup_s` is the time from the command to the first step of the two stages.

The runs are repeated in turn, and the fastest step of each counts: what other programs do to
the machine only ever slows a step down.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints
from benchmarks.ranks import run_ranks

MICRO_BATCHES = 16
LENGTH = 512
VOCABULARY = 1024
MODEL = {
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


@dataclass(frozen=True)
class Setting:
    """One way to run the model.

    Attributes:
        key: in the JSON object.
    """

    key: str
    name: str
    stages: int
    threads: int
    parts: list[int]


SETTINGS = (
    Setting("one_thread", "one process, one thread", stages=1, threads=1, parts=[14]),
    Setting("two_threads", "one process, two threads", stages=1, threads=2, parts=[14]),
    Setting("pipeline", "two stages, one thread each", stages=2, threads=1, parts=[7, 7]),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of a two-stage pipeline, and what its checkpoints cost.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--rounds", type=int, default=2, help="how often each setting is measured")
    parser.add_argument("--steps", type=int, default=3, help="measured steps in each round")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to work; its disk is the one measured")
    parser.add_argument("--only", choices=("speed", "checkpoints"), help="measure one of the two halves alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(Setting(**json.loads(arguments.worker)), arguments.folder, arguments.steps)
        return
    figures: dict[str, Any] = {}
    console = Console(quiet=arguments.json)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="benchmark-") as name:
        folder = Path(name).resolve()
        if arguments.only != "checkpoints":
            figures |= speed(folder, arguments.rounds, arguments.steps)
            console.print(table(figures))
            console.print(f"start-up to the first step of two stages: {figures['startup_s']:.1f} s")
        if arguments.only != "speed":
            figures |= checkpoints.measure(folder)
            console.print(checkpoints.table(figures))
    if arguments.json:
        print(json.dumps(figures))


def speed(folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Tokens per second of each setting, the share of the ideal, and the time to start."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    speeds = {setting.key: 0.0 for setting in SETTINGS}
    startup = float("inf")
    for _ in range(rounds):
        for setting in SETTINGS:
            tokens_per_s, seconds = launch(setting, folder, steps)
            speeds[setting.key] = max(speeds[setting.key], tokens_per_s)
            if setting.stages > 1:
                startup = min(startup, seconds)
    stages = SETTINGS[-1].stages
    ideal = MICRO_BATCHES / (MICRO_BATCHES + stages - 1) * stages * speeds["one_thread"]
    return {
        "pipeline_vs_ideal": speeds["pipeline"] / ideal,
        "startup_s": startup,
        "tokens_per_s": speeds | {"ideal": ideal},
    }


def table(figures: dict[str, Any]) -> Table:
    """The speeds for people."""
    speeds = figures["tokens_per_s"]
    made = Table(title=f"tokens/s, {MICRO_BATCHES} micro-batches of {LENGTH} tokens")
    made.add_column("setting")
    made.add_column("tokens/s", justify="right")
    made.add_column("of the ideal", justify="right")
    names = {setting.key: setting.name for setting in SETTINGS} | {"ideal": "the ideal of two stages"}
    for key, name in names.items():
        made.add_row(name, f"{speeds[key]:,.0f}", f"{speeds[key] / speeds['ideal']:.3f}")
    return made


def launch(setting: Setting, folder: Path, steps: int) -> tuple[float, float]:
    """Run one setting through the real launcher; its tokens per second, and the seconds until its first step."""
    begin = time.time()
    words = ("--worker", json.dumps(asdict(setting)), "--folder", str(folder), "--steps", str(steps))
    run_ranks(setting.stages, "benchmarks.throughput", *words)
    measured = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return measured["tokens_per_s"], measured["first_step"] - begin


def measure(setting: Setting, folder: Path, steps: int) -> None:
    """One rank's work: a step to warm up, then the fastest of `steps` steps."""
    import torch

    from data.loader import Loader
    from data.sample_set import InMemory
    from models.spec import ModelSpec
    from training import distributed
    from training.config import TrainConfig
    from training.pipeline_trainer import PipelineTrainer

    config = TrainConfig.model_validate(
        {
            "model_path": str(folder),
            "data_path": "",
            "save_path": "",
            "from_scratch": True,
            "train_batch_size": MICRO_BATCHES,
            "model_topo": {"process_topology": {"dims": [setting.stages, 1]}, "parts": setting.parts},
        }
    )
    place = distributed.Place.from_environment()
    assert place is not None
    distributed.start(place, config.model_topo)
    torch.set_num_threads(setting.threads)
    ids = torch.randint(0, VOCABULARY, (MICRO_BATCHES, LENGTH)).tolist()
    loader = Loader(InMemory([{"input_ids": row, "labels": row} for row in ids]), MICRO_BATCHES, 1, 1, seed=0)
    trainer = PipelineTrainer.build(config, ModelSpec.from_folder(folder), folder, total_steps=steps + 1)
    first_step = time.time()
    seconds = []
    for step in range(steps + 1):
        begin = time.perf_counter()
        trainer.train_step(loader, loader.batch(step))
        seconds.append(time.perf_counter() - begin)
    if place.rank == 0:
        tokens_per_s = MICRO_BATCHES * LENGTH / min(seconds[1:])
        measured = {"tokens_per_s": tokens_per_s, "first_step": first_step}
        (folder / "result.json").write_text(json.dumps(measured), encoding="utf-8")
    distributed.stop()


if __name__ == "__main__":
    main()

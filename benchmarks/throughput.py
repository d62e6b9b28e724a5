"""How much of the ideal speed-up a pipeline of two stages reaches on two cores: `python -m benchmarks.throughput`.

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
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from training.distributed import free_port

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
    """One way to run the model."""

    name: str
    stages: int
    threads: int
    parts: list[int]


SETTINGS = (
    Setting("one process, one thread", stages=1, threads=1, parts=[14]),
    Setting("one process, two threads", stages=1, threads=2, parts=[14]),
    Setting("two stages, one thread each", stages=2, threads=1, parts=[7, 7]),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of a two-stage pipeline against one process.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=2, help="how often each setting is measured")
    parser.add_argument("--steps", type=int, default=3, help="measured steps in each round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(Setting(**json.loads(arguments.worker)), Path(arguments.folder), arguments.steps)
        return
    speeds = {setting.name: 0.0 for setting in SETTINGS}
    startup = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for _ in range(arguments.rounds):
            for setting in SETTINGS:
                speed, seconds = launch(setting, folder, arguments.steps)
                speeds[setting.name] = max(speeds[setting.name], speed)
                if setting.stages > 1:
                    startup = min(startup, seconds)
    report(speeds, startup, as_json=arguments.json)


def report(speeds: dict[str, float], startup: float, as_json: bool) -> None:
    """Print tokens per second and the share of the ideal."""
    one, two, pipeline = (speeds[setting.name] for setting in SETTINGS)
    stages = SETTINGS[-1].stages
    ideal = MICRO_BATCHES / (MICRO_BATCHES + stages - 1) * stages * one
    if as_json:
        figures = {"one_thread": one, "two_threads": two, "pipeline": pipeline, "ideal": ideal}
        print(json.dumps({"pipeline_vs_ideal": pipeline / ideal, "startup_s": startup, "tokens_per_s": figures}))
        return
    table = Table(title=f"tokens/s, {MICRO_BATCHES} micro-batches of {LENGTH} tokens")
    table.add_column("setting")
    table.add_column("tokens/s", justify="right")
    table.add_column("of the ideal", justify="right")
    for name, speed in speeds.items():
        table.add_row(name, f"{speed:,.0f}", f"{speed / ideal:.3f}")
    table.add_row("the ideal of two stages", f"{ideal:,.0f}", "1.000")
    console = Console()
    console.print(table)
    console.print(f"start-up to the first step of two stages: {startup:.1f} s")


def launch(setting: Setting, folder: str, steps: int) -> tuple[float, float]:
    """Run one setting through the real launcher; its tokens per second, and the seconds until its first step."""
    result = Path(folder) / "result.json"
    begin = time.time()
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(setting.stages)]
    command += ["--master_port", str(free_port()), __file__]
    command += ["--worker", json.dumps(asdict(setting)), "--folder", folder, "--steps", str(steps)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{setting.name} failed:\n{done.stdout}{done.stderr}")
    measured = json.loads(result.read_text(encoding="utf-8"))
    return measured["tokens_per_s"], measured["first_step"] - begin


def measure(setting: Setting, folder: Path, steps: int) -> None:
    """One rank's work: a step to warm up, then the fastest of `steps` steps."""
    import torch

    from data.loader import Loader
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
    loader = Loader([{"input_ids": row, "labels": row} for row in ids], MICRO_BATCHES, 1, 1, seed=0)
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

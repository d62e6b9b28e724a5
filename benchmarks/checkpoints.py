"""Measure the cost of a checkpoint; it takes 8 GB of disk.

A model with the shapes of SmolLM2-135M trains three steps in two stages through the real entry point. The same
processes then save a checkpoint, durable and with its checksums, and the same state dicts by `torch.save` and fsync, in
turn. Both begin with an idle disk and end when all bytes are on it; `save_vs_torch_save` is the ratio of the medians.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import yaml
from rich.table import Table

from benchmarks.parts import Figures, run_parts, table_of
from benchmarks.ranks import run_ranks, tell
from benchmarks.tokenizing import SAMPLES, make_tokenizer

if TYPE_CHECKING:  # the parent process needs neither torch nor deepspeed
    from training.loop import Run

REPETITIONS, TARGET = 6, 1.5
MODEL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CONFIG = {
    "from_scratch": True,
    "data_path": str(SAMPLES),
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 16,
    "max_seq_len": 512,
    "max_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-4}},
    "keep_last": 100,
    "model_topo": {"process_topology": {"dims": [2, 1]}, "parts": [17, 15]},
}


def measure(folder: Path) -> Figures:
    make_tokenizer(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    paths = {"model_path": str(folder / "model"), "save_path": str(folder / "run")}
    (folder / "run.yml").write_text(yaml.safe_dump(CONFIG | paths), encoding="utf-8")
    medians: Figures = run_ranks(2, "benchmarks.checkpoints", folder, "train")
    return medians | {"save_vs_torch_save": medians["save_s"] / medians["torch_save_s"]}


def table(figures: Figures) -> Table:
    seconds = f"{figures['save_s']:.2f} against {figures['torch_save_s']:.2f}"
    row = ("save_vs_torch_save", f"{figures['save_vs_torch_save']:.2f}", f"at most {TARGET}", seconds)
    return table_of("checkpoints of 2.6 GB", ("figure", "measured", "target", "seconds"), [row])


def train(folder: Path) -> None:
    """Run one rank of a training job, then measure."""
    import train_ds
    from training import job

    sys.argv[1:] = ["--config", str(folder / "run.yml"), *(word for word in sys.argv if "local_rank" in word)]
    with patch.object(job, "train", train_and_measure):
        train_ds.main()


def train_and_measure(run: Run) -> int:
    """Train, then repeat what is to be compared."""
    import torch

    from training import loop
    from training.checkpoint.folder import step_folder

    done = loop.train(run)
    save_path, plain_folder = run.checkpointer.save_path, run.checkpointer.save_path / "torch_save"
    states = saved_states(run, done + 1)
    seconds: dict[str, list[float]] = {}
    for step in range(done + 2, done + 2 + REPETITIONS):
        folder = step_folder(save_path, step)
        writing = [
            ("save_s", partial(run.checkpointer.save, step)),
            ("torch_save_s", partial(save_plainly, states, plain_folder)),
        ]
        for name, work in writing[:: 1 if step % 2 else -1]:  # the disk may have a cache: each is first in turn
            seconds.setdefault(name, []).append(timed(work))
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder)
            shutil.rmtree(plain_folder)
    tell(save_path.parent, {name: statistics.median(each) for name, each in seconds.items()})
    return done


def saved_states(run: Run, step: int) -> dict[str, Any]:
    """Save a checkpoint; return what this rank wrote, by file name."""
    from training.checkpoint.deepspeed_files import CheckpointFiles

    states: dict[str, Any] = {}
    save = CheckpointFiles.save

    def keep(files: CheckpointFiles, state_dict: Any, path: str) -> None:
        states[Path(path).name] = state_dict
        save(files, state_dict, path)

    with patch.object(CheckpointFiles, "save", keep):
        run.checkpointer.save(step)
    return states


def save_plainly(states: dict[str, Any], folder: Path) -> None:
    import torch

    folder.mkdir(exist_ok=True)
    for name, state in states.items():
        with open(folder / name, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


def timed(work: Callable[[], object]) -> float:
    """Time some work of all ranks, from an idle disk on."""
    import torch

    os.sync()
    torch.distributed.barrier()
    begin = time.perf_counter()
    work()
    torch.distributed.barrier()
    return time.perf_counter() - begin


if __name__ == "__main__":
    run_parts("Cost of checkpoints.", {"checkpoints": (measure, table)}, {"train": train})

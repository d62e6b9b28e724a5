"""What checkpoints and bookkeeping cost a run: a part of `python -m benchmarks.throughput`.

A model with the shapes of SmolLM2-135M trains an epoch of the shipped records in two stages through the real launcher
and the real door, as `make quickstart` does: fp32, ZeRO-1, TensorBoard, an evaluation every few steps. In the same
processes follow, in turn and several times each, the things to compare; the medians count. All of it wants a machine
that does nothing else.

- `save_vs_torch_save`: a checkpoint, durable and with its checksums, against `torch.save` and fsync of the same state
  dicts, file by file, in the same processes. Both begin with an idle disk and end when all bytes are on it.
- `verify_vs_read`: what a resumed run does to see that a checkpoint is whole, against reading the same files in the
  same processes. Both begin with the files out of the system's cache.
- `bookkeeping_share`: the time that rank 0, which reports, spends in the training loop outside of training steps,
  evaluation's forward passes and saving, as a share of the steps. The first step is left out.
"""

from __future__ import annotations

import argparse
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

from benchmarks.ranks import ROOT, run_ranks, tell

if TYPE_CHECKING:  # the parent process needs neither torch nor deepspeed
    from training.loop import Run

RECORDS = ROOT / "data" / "samples" / "faq.json"
REPETITIONS = 6
TARGETS = {"save_vs_torch_save": 1.5, "verify_vs_read": 1.1, "bookkeeping_share": 0.01}
COMPARED = {"save_vs_torch_save": ("save_s", "torch_save_s"), "verify_vs_read": ("verify_s", "read_s")}
VOCABULARY = 49152
MODEL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CONFIG = {
    "from_scratch": True,
    "data_path": str(RECORDS),
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 16,
    "max_seq_len": 512,
    "eval_interval": 3,
    "keep_last": 100,
    "model_topo": {"process_topology": {"dims": [2, 1]}, "parts": [17, 15]},
}


def measure(folder: Path) -> dict[str, Any]:
    """Run the model in two processes and give the figures.

    Args:
        folder: where to work; its disk is the one measured, and must hold some 8 GB.
    """
    make_model(folder / "model")
    held_out = json.loads(RECORDS.read_text(encoding="utf-8"))[::8]
    (folder / "held_out.json").write_text(json.dumps(held_out), encoding="utf-8")
    paths = {"model_path": "model", "save_path": "run", "eval_data_path": "held_out.json"}
    config = CONFIG | {key: str(folder / name) for key, name in paths.items()}
    (folder / "run.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    measured: dict[str, Any] = run_ranks(2, "benchmarks.checkpoints", folder)
    return measured


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    made = Table(title=f"checkpoints of {figures['checkpoint_gb']:.1f} GB, steps of {figures['step_s']:.1f} s")
    for column in ("figure", "measured", "target", "seconds"):
        made.add_column(column, justify="left" if column == "figure" else "right")
    for name, target in TARGETS.items():
        compared = [figures[key] for key in COMPARED.get(name, ())]
        seconds = " against ".join(f"{each:.2f}" for each in compared)
        made.add_row(name, f"{figures[name]:.4g}", f"at most {target}", seconds)
    return made


def make_model(folder: Path) -> None:
    """A folder to train from scratch: config and a tokenizer made of the records."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([RECORDS.read_text(encoding="utf-8")], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")


def train_and_measure(run: Run) -> int:
    """One rank's work in the place of `training.loop.train`: it trains, then repeats what is to be compared."""
    import torch

    from training.checkpoint.folder import step_folder

    done, figures = watched_training(run)
    save_path, plain_folder = run.checkpointer.save_path, run.checkpointer.save_path / "torch_save"
    states = saved_states(run, done + 1)
    seconds: dict[str, list[float]] = {}
    for step in range(done + 2, done + 2 + REPETITIONS):
        folder = step_folder(save_path, step)
        writing = [
            ("save_s", partial(run.checkpointer.save, step)),
            ("torch_save_s", partial(save_plainly, states, plain_folder)),
        ]
        reading = [("verify_s", partial(verify, run)), ("read_s", partial(read_plainly, folder))]
        # The disk may have a cache of its own, so each is the first one every other time.
        order = 1 if step % 2 else -1
        for name, work in writing[::order] + reading[::order]:
            forget(folder)
            seconds.setdefault(name, []).append(timed(work))
        gigabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder)
            shutil.rmtree(plain_folder)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = {name: medians[ours] / medians[plain] for name, (ours, plain) in COMPARED.items()}
    tell(save_path.parent, ratios | figures | medians | {"checkpoint_gb": gigabytes})
    return done


def watched_training(run: Run) -> tuple[int, dict[str, float]]:
    """Train; the number of the last step, and how the time was spent."""
    from training import loop

    spans: list[tuple[str, float, float]] = []

    def watched(owner: Any, name: str) -> Any:
        work = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = work(*arguments)
            spans.append((name, begin, time.perf_counter()))
            return result

        return patch.object(owner, name, wrapped)

    with watched(run.trainer, "train_step"), watched(run.trainer, "eval_loss"), watched(run.checkpointer, "save"):
        done = loop.train(run)
    end = time.perf_counter()
    first_step = next(ended for name, _, ended in spans if name == "train_step")
    later = [(name, ended - begin) for name, begin, ended in spans if begin >= first_step]
    steps = [each for name, each in later if name == "train_step"]
    aside = end - first_step - sum(each for _, each in later)
    return done, {"bookkeeping_share": aside / sum(steps), "step_s": statistics.median(steps)}


def saved_states(run: Run, step: int) -> dict[str, Any]:
    """What this rank gives to be written when it saves a checkpoint, by file name."""
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


def verify(run: Run) -> None:
    """Look for the newest whole checkpoint, as a run that goes on does."""
    from rich.console import Console

    from training.checkpoint.finding import find_checkpoint

    checkpointer = run.checkpointer
    assert find_checkpoint(checkpointer.config, checkpointer.save_path, checkpointer.disk, Console(quiet=True))


def read_plainly(folder: Path) -> None:
    """Read this rank's share of a checkpoint."""
    import torch

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    piece = bytearray(16 * 2**20)
    for path in sorted(folder.iterdir())[rank::ranks]:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def forget(folder: Path) -> None:
    """Take a checkpoint out of the system's cache, where there is one."""
    import torch

    from models.checkpoint.source import forget_cached

    if torch.distributed.get_rank() == 0 and folder.exists():
        for path in folder.iterdir():
            forget_cached(path)


def timed(work: Callable[[], object]) -> float:
    """Seconds until all ranks have done some work; what they write, they bring to the disk."""
    import torch

    os.sync()
    torch.distributed.barrier()
    begin = time.perf_counter()
    work()
    torch.distributed.barrier()
    return time.perf_counter() - begin


if __name__ == "__main__":  # one rank of the run
    import train_ds
    from training import job

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    arguments, from_launcher = parser.parse_known_args()
    sys.argv[1:] = ["--config", str(arguments.folder / "run.yml"), *from_launcher]
    with patch.object(job, "train", train_and_measure):
        train_ds.main()

"""Measure the memory of training; half an hour on two cores, hours where the CPU has no kernels for bf16.

- `planner`: what `--plan` predicts against what a run takes. Two stages train a llama of 160M parameters for two steps;
  measured is the growth of resident memory, on a GPU (one process) what torch allocated. On a CPU freed memory goes
  back at once: a run keeps it to save time. `planner_error` is the largest relative error of all cases and ranks.
- `lora`: the same of adapters, over a base in 32, 16 and 4 bits, and of frozen blocks; `lora_error`.
- `chunks`: rows of growing length, whole and in chunks of one size, in blocks that recompute; beside them what keys and
  values take: of a row on its way back with the sums of their gradients, and of the row behind it. `chunks_error` is
  that of the rows in chunks.
- `images`: models of images and text (`benchmarks.image_memory`), whose tower learns nothing, or all; `images_error`.
- `quickstart`: the quickstart run whole; `quickstart_gb` is the largest sum of the proportional set sizes of all its
  processes (a page shared by several counts once), looked at twice a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.report import Report, against_targets, run_parts, table_of
from benchmarks.tokenizing import peak_of
from benchmarks.workers import ROOT, run_workers, write_figures

if TYPE_CHECKING:
    import torch

LENGTH, MICRO_BATCHES, STEPS = 1024, 2, 2  # as many micro-batches as the first of two stages of 1F1B holds
# Of malloc.h, and bytes of the smallest block that goes back at once. Above, tensors of a chunk stay in the C library's
# heap with holes between them: in one stage with rows of 4,096 tokens 80 MB, beside 314 MB of tensors, at 1 MB.
MMAP_THRESHOLD, GIVEN_BACK = -3, 2**16
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
LION: dict[str, Any] = {"optimizer": {"type": "Lion", "params": {"lr": 1.0e-5}}}
BF16, RECOMPUTED = {"bf16": {"enabled": True}}, {"use_grad_ckpt": True}
DUAL: dict[str, Any] = {"schedule": "dualpipev", "train_batch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "fp32, AdamW": {},
    "fp32, AdamW, dualpipev": DUAL,
    "fp32, AdamW, recomputed": RECOMPUTED,
    "fp32, AdamW, stage 0": RECOMPUTED | {"zero_optimization": {"stage": 0}},
    "bf16, AdamW": BF16,
    "bf16, AdamW, dualpipev": BF16 | DUAL,
    "bf16, AdamW, recomputed": BF16 | RECOMPUTED,
    "bf16, Lion, recomputed": BF16 | RECOMPUTED | LION,
}
ZERO_CASES: dict[str, dict[str, Any]] = {
    f"{name}, ZeRO-{stage}": keys | {"zero_optimization": {"stage": stage}}
    for stage, (name, keys) in product((2, 3), {"fp32": {}, "bf16": BF16}.items())
}
LORA: dict[str, Any] = {"lora": {"r": 16, "alpha": 32}, "from_scratch": False}
NF4: dict[str, Any] = LORA | {"lora": LORA["lora"] | {"base": "nf4"}}
FROZEN: dict[str, Any] = {"freeze": ["embed_tokens", r"layers\.[0-4]\."], "from_scratch": False}
LORA_CASES: dict[str, dict[str, Any]] = {
    "fp32, LoRA": LORA,
    "fp32, LoRA, dualpipev": LORA | DUAL,
    "bf16, LoRA, recomputed": LORA | BF16 | RECOMPUTED,
    "bf16, QLoRA": NF4 | BF16,
    "bf16, QLoRA, recomputed": NF4 | BF16 | RECOMPUTED,
    "fp32, frozen blocks": FROZEN,
}
CHUNK, LENGTHS = 512, (2048, 4096, 8192)
GROUPED: dict[str, Any] = MODEL | {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": max(LENGTHS),
}


def measure(figure: str, cases: dict[str, dict[str, Any]], folder: Path) -> Report:
    """Measure every case.

    Args:
        figure: the beginning of the figures' names.
    """
    import torch

    from benchmarks.steps import save_random_model

    stages = 1 if torch.cuda.is_available() else 2
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    if not all(keys.get("from_scratch", True) for keys in cases.values()):
        save_random_model(folder)
    asked = {name: keys for name, keys in cases.items() if stages > 1 or "schedule" not in keys}
    found = {name: run_workers(stages, "benchmarks.memory", folder, "plan", keys=keys) for name, keys in asked.items()}
    error = max(abs(plan / peak - 1) for plan, peak in chain.from_iterable(found.values()))
    title = f"peak memory of {LENGTH} tokens a micro-batch; {figure}_error {error:.3f}"
    rows = []
    for name, case in found.items():
        for rank, (plan, peak) in enumerate(case):
            rows.append((name, str(rank), f"{plan / 1e9:.2f}", f"{peak / 1e9:.2f}", f"{plan / peak - 1:+.1%}"))
    table = table_of(title, ("case", "rank", "planned, GB", "measured, GB", "error"), rows)
    return Report({f"{figure}_error": error, f"{figure}_cases": found}, table)


def measure_chunks(folder: Path) -> Report:
    """Measure rows of every length, whole and in chunks."""
    import torch

    stages = 1 if torch.cuda.is_available() else 2
    (folder / "config.json").write_text(json.dumps(GROUPED), encoding="utf-8")
    ways: dict[str, dict[str, Any]] = {"whole": RECOMPUTED, f"chunks of {CHUNK}": RECOMPUTED | {"row_chunk": CHUNK}}
    found, rows, errors = {}, [], []
    for length, (way, keys) in product(LENGTHS, ways.items()):
        peaks = run_workers(stages, "benchmarks.memory", folder, "plan", keys=keys, length=length)
        found[f"{length}, {way}"] = peaks
        kept = f"{3 * keys_and_values(length) / stages / 1e6:,.0f}" if "row_chunk" in keys else ""
        for rank, (plan, peak) in enumerate(peaks):
            if "row_chunk" in keys:
                errors.append(abs(plan / peak - 1))
            figures = f"{plan / 1e6:,.0f}", f"{peak / 1e6:,.0f}", f"{plan / peak - 1:+.1%}", kept
            rows.append((f"{length:,}", way, str(rank), *figures))
    title = f"peak memory of {MICRO_BATCHES} rows a step, in blocks that recompute; chunks_error {max(errors):.3f}"
    columns = ("tokens a row", "rows", "rank", "planned, MB", "measured, MB", "error", "keys and values, MB")
    return Report({"chunks_error": max(errors), "chunks_cases": found}, table_of(title, columns, rows))


def measure_images(folder: Path) -> Report:
    """Measure models whose tower takes as much as their blocks, at rest and trained."""
    import torch

    from benchmarks.image_memory import MODELS, write_model

    stages = 1 if torch.cuda.is_available() else 2
    found, rows = {}, []
    trained: dict[str, Any] = {"vision": {"train": "all"}}
    ways = {"nothing": {"vision": {"train": "nothing"}}, "all": trained, "all, recomputed": trained | RECOMPUTED}
    for name, (train, keys) in product(MODELS, ways.items()):
        write_model(folder, name)
        peaks = run_workers(stages, "benchmarks.memory", folder, "plan", keys=keys, images=True)
        found[f"{name}, {train}"] = peaks
        for rank, (plan, peak) in enumerate(peaks):
            figures = f"{plan / 1e6:,.0f}", f"{peak / 1e6:,.0f}", f"{plan / peak - 1:+.1%}"
            rows.append((name, train, str(rank), *figures))
    error = max(abs(plan / peak - 1) for plan, peak in chain.from_iterable(found.values()))
    columns = ("layout of", "trained of the tower", "rank", "planned, MB", "measured, MB", "error")
    title = f"peak memory of {MICRO_BATCHES} rows of {LENGTH} tokens with images; images_error {error:.3f}"
    return Report({"images_error": error, "images_cases": found}, table_of(title, columns, rows))


def keys_and_values(length: int) -> int:
    """Count the bytes of a row's keys and values in all layers, in fp32."""
    head = GROUPED["hidden_size"] // GROUPED["num_attention_heads"]
    return int(2 * 4 * length * GROUPED["num_key_value_heads"] * head * GROUPED["num_hidden_layers"])


def plan_and_train(folder: Path, keys: dict[str, Any], length: int = LENGTH, images: bool = False) -> None:
    """Plan, build and train on one rank; leave both peaks of every rank.

    Args:
        images: whether the rows have some.
    """
    from benchmarks.image_memory import RandomPixels, with_images
    from benchmarks.steps import joined, random_rows, run_config, topology
    from models.api import read_spec
    from options.images.model import seeing_model
    from options.planner.inputs import Basis, Workload
    from options.planner.plan import Plan
    from options.planner.planning import divide
    from training.batches import build_loader
    from training.config.precision import training_dtype
    from training.distributed import freed_memory, processes
    from training.metrics.devices import this_device
    from training.metrics.peak_memory import peak_memory
    from training.runs import trainer_kind
    from training.trained import with_trained

    ranks, in_stages = int(os.environ["WORLD_SIZE"]), keys not in ZERO_CASES.values()
    dims = (ranks, 1) if in_stages else (1, ranks)
    config = run_config(folder, MICRO_BATCHES if in_stages else 2 * ranks, length, **keys, **topology(*dims))
    with patch.object(freed_memory, "keep", _give_back_memory), joined(config):
        spec, collation = with_trained(read_spec(folder), config), None
        data = random_rows(spec.config.vocab_size, config.train_batch_size, length)
        if images:
            spec, data = seeing_model(config, spec), with_images(data)
            assert spec.family.sees is not None
            collation = RandomPixels(data, spec.family.sees)
        loader = build_loader(data, config, collation=collation)
        planned = loader if images else None
        plan = Plan.make(Basis(config, spec, Workload.of(planned, config), this_device(), in_stages=in_stages))
        _load_libraries(training_dtype(config))
        _forget_peak()
        before = peak_memory()
        trainer = trainer_kind(config, in_stages).build(config, spec, folder, divide(config, spec, loader=planned))
        _forget_peak()  # pages of the weights' file count while they are read
        for step in range(STEPS):
            trainer.train_step(loader, loader.batch(step))
        write_figures(folder, processes.gather((plan.stages[trainer.stage].memory.peak, peak_memory() - before)))


def _load_libraries(dtype: torch.dtype) -> None:
    """Load what the first step would load, which is no tensor of a plan."""
    import bitsandbytes  # noqa: F401
    import torch

    weight = torch.ones(256, 256, dtype=dtype, requires_grad=True)
    torch.nn.functional.linear(weight, weight).sum().backward()


def _forget_peak() -> None:
    """Let the kernel forget the peak of this process so far."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _give_back_memory() -> None:
    """Let the C library give back every freed block that is not small."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, GIVEN_BACK)


def quickstart(folder: Path) -> Report:
    """Run the quickstart; its own lines go to standard error."""
    from quickstart.base_model import make_base

    make_base(folder / "base", folder / "download")
    begin = time.monotonic()
    command = [sys.executable, "-m", "quickstart", "--save-path", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    peak = peak_of(process)
    if process.returncode:
        sys.exit("the quickstart failed")
    left = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "download" not in path.parts)
    minutes = (time.monotonic() - begin) / 60
    return against_targets(
        "the quickstart",
        quickstart_gb=(peak / 1e9, "at most 6"),
        quickstart_minutes=(minutes, ""),
        quickstart_disk_gb=(left / 1e9, ""),
    )


if __name__ == "__main__":
    parts: dict[str, Callable[[Path], Report]] = {
        "planner": partial(measure, "planner", CASES),
        "lora": partial(measure, "lora", LORA_CASES),
        "zero": partial(measure, "zero", ZERO_CASES),
        "chunks": measure_chunks,
        "images": measure_images,
        "quickstart": quickstart,
    }
    run_parts("Memory: peaks, predicted and measured.", parts, {"plan": plan_and_train})

"""What the GPU benchmarks train: models of two sizes, random rows, and as many layers as fit.

The planner decides: the layers asked for, or fewer, until its plan and a tenth of the memory on top fit into what is
free. On a CPU everything is tiny, in fp32, and nothing limits it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # the command knows what to measure before its packages are installed
    from data.sample_set import InMemory
    from training.config.keys import TrainConfig
    from training.metrics.devices import Device

ROOM = 0.1  # of the memory: what kernels and libraries take for themselves, and gaps
COMMON: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True)
class Measurement:
    """What one worker trains, and how.

    Attributes:
        model: of `MODELS`; on a CPU each is the tiny one.
        layers: of the model, at most; all where absent.
        engine: Pipetune's, or transformers' Trainer, plain or with Liger's kernels.
        rows: one sample each, or packed with many.
        attention: one of `benchmarks.gpu_worker.KERNELS`, or `auto`; that of `use_flash_attn: true` where absent.
        micro_batch: rows.
        dims: stages and replicas.
        fused: whether Liger's kernels replace norms, SwiGLU and rotary angles in Pipetune's blocks.
        keys: more of a run's config.
        profile: whether one more step is profiled by kinds of kernels.
        exact: fp32, a few layers and the usual attention, so that losses can be compared with those of other ways.
        length: tokens of a full row on a GPU; a step has 32,768 in all.
    """

    model: Literal["7b", "1b", "tiny"] = "7b"
    layers: int | None = 8
    engine: Literal["pipetune", "trainer", "liger"] = "pipetune"
    rows: Literal["full", "packed"] = "full"
    attention: str = ""
    micro_batch: int = 1
    dims: tuple[int, int] = (1, 1)
    fused: bool = False
    keys: dict[str, Any] = field(default_factory=dict)
    profile: bool = False
    exact: bool = False
    length: int = 4096


class Size(NamedTuple):
    """The size of a step: rows of full length; packed ones have about as many tokens."""

    length: int
    rows: int


WHOLE, TINY = Size(length=4096, rows=8), Size(length=64, rows=8)


def write_model(folder: Path, shape: dict[str, Any], layers: int, length: int) -> None:
    """Write the folder of a model that trains from random weights: config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = COMMON | shape | {"num_hidden_layers": layers, "max_position_embeddings": length}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def samples_of(measurement: Measurement, words: int, size: Size) -> InMemory:
    """Make a step's random samples, the same on every rank; packed ones are a sixteenth to a half of a row long."""
    import numpy

    from benchmarks.steps import random_rows
    from data.sample_set import InMemory

    if measurement.rows == "full":
        return random_rows(words, size.rows, size.length)
    chance = numpy.random.Generator(numpy.random.PCG64(0))
    rows, tokens = [], size.rows * size.length
    while tokens > 1:
        length = min(tokens, int(chance.integers(size.length // 16, size.length // 2 + 1)))
        rows.append(chance.integers(0, words, length).tolist())
        tokens -= length
    return InMemory([{"input_ids": row, "labels": row} for row in rows])


def config_of(measurement: Measurement, model: Path, samples: int, size: Size, half: bool) -> TrainConfig:
    """Make the run's config.

    Args:
        samples: in a step.
        half: whether in bf16, with the fastest attention; else fp32.
    """
    from benchmarks.steps import run_config, topology

    keys: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": measurement.micro_batch,
        "pack_len": size.length if measurement.rows == "packed" else None,
        "bf16": {"enabled": half},
        "use_flash_attn": half,
        "compile": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3 if measurement.exact else 1.0e-4}},
    }
    return run_config(model, samples, size.length, **topology(*measurement.dims) | keys | measurement.keys)


def planned_peak(config: TrainConfig, samples: InMemory, device: Device) -> int:
    """Plan the bytes that the fullest rank needs."""
    from models.api import read_spec
    from options.planner.inputs import Basis, Workload
    from options.planner.plan import Plan
    from training.batches import build_loader

    work = Workload.measured(build_loader(samples, config), config)
    return Plan.make(Basis(config, read_spec(Path(config.model_path)), work, device)).peak


def fit(
    measurement: Measurement, folder: Path, samples: InMemory, size: Size, device: Device, free: int | None, half: bool
) -> tuple[TrainConfig, int]:
    """Make the config of a run with as many layers as fit, and plan its bytes.

    Args:
        folder: the model is written there.
        free: bytes of the device; None where nothing is known to limit them.

    Raises:
        SystemExit: not even one layer fits.
    """
    shape = MODELS[measurement.model]
    most = min(measurement.layers or shape["num_hidden_layers"], shape["num_hidden_layers"])
    config = config_of(measurement, folder, len(samples.samples), size, half)
    limit = None if free is None else int((1 - ROOM) * min(free, device.memory or free))

    def peak(layers: int) -> int:
        write_model(folder, shape, layers, size.length)
        return planned_peak(config, samples, device)

    layers = most if limit is None else bisect_right(range(1, most + 1), limit, key=peak)
    if not layers:
        raise SystemExit(f"error: {measurement.model}: not one layer fits into {limit:,} bytes")
    return config, peak(layers)

"""When memory runs out: one line with the stage, what it held, what the plan had said, and the next cheapest change.

A run that was planned too tightly fails after hours; its user wants to know what to change, and not a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import ByteSize, TypeAdapter

from data.loader import Loader
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.metrics.devices import GIGA, this_device
from training.metrics.peak_memory import peak_memory
from training.plan.alternatives import next_change
from training.plan.basis import Basis
from training.plan.plan import Plan
from training.plan.workload import Workload

ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)  # of CUDA's allocator and of the CPU's


@contextmanager
def out_of_memory_told(config: TrainConfig, spec: ModelSpec, stage: int, loader: Loader | None) -> Iterator[None]:
    """Around what takes memory: torch's complaint becomes one line.

    Args:
        config: of a pipeline, with `parts`; no plan is told for one without.
        stage: that this process runs; 0 under plain ZeRO.
        loader: of the data to plan for; every sample counts as `max_seq_len` tokens where absent.

    Raises:
        ConfigError: memory has run out.
    """
    try:
        yield
    except RuntimeError as error:
        if asked := ASKED.search(str(error)):
            size = TypeAdapter(ByteSize).validate_python(asked[1].replace("bytes", "B"))
            raise ConfigError(f"{_held(stage, _gb(size))}{_planned(config, spec, stage, loader)}") from error
        raise


def _held(stage: int, asked: str) -> str:
    where = "this machine's memory"
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        where = f"the {total / GIGA:.1f} GB of {torch.cuda.get_device_name()}"
    return f"out of memory: stage {stage} had at most {_gb(peak_memory())} of {where}, and asked for {asked}"


def _planned(config: TrainConfig, spec: ModelSpec, stage: int, loader: Loader | None) -> str:
    if config.model_topo.parts is None:  # a plan is one of a pipeline
        return ""
    basis, _ = Basis.of_run(config, spec, Workload.of(loader, config), this_device())
    plan = Plan.make(basis)
    line = f"; --plan says {_gb(plan.stages[stage].memory.peak)}"
    advice = next_change(plan, stage)
    return f"{line}; next: {advice[0]}, with which it says {_gb(advice[1])}" if advice else line


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / GIGA:.2f} GB"

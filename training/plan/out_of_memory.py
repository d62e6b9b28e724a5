"""When memory runs out: one line with the stage, what it held, what the plan had said, and the next cheapest change.

A run that was planned too tightly fails after hours; its user wants to know what to change, and not a traceback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import TracebackType

import torch

from data.loader import Loader
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.metrics.devices import this_device
from training.metrics.peak_memory import peak_memory
from training.plan.alternatives import next_change
from training.plan.basis import Basis, Workload
from training.plan.plan import Plan

GIB = 2**30
ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)  # of CUDA's allocator and of the CPU's


@dataclass(frozen=True)
class OutOfMemory:
    """`with` it around what takes memory: torch's complaint becomes one line.

    Attributes:
        config: of a pipeline, with `parts`; no plan is told for one without.
        stage: that this process runs; 0 under plain ZeRO.
        loader: of the data to plan for; every sample counts as `max_seq_len` tokens where absent.
    """

    config: TrainConfig
    spec: ModelSpec
    stage: int
    loader: Loader | None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        """Raise the line in place of torch's error.

        Raises:
            ConfigError: memory has run out.
        """
        if isinstance(error, RuntimeError) and (asked := ASKED.search(str(error))):
            raise ConfigError(f"{self._held(asked[1])}{self._planned()}") from error

    def _held(self, asked: str) -> str:
        where = "this machine's memory"
        if torch.cuda.is_available():
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            where = f"the {total / GIB:.1f} GiB of {torch.cuda.get_device_name()}"
        return f"out of memory: stage {self.stage} had at most {_gib(peak_memory())} of {where}, and asked for {asked}"

    def _planned(self) -> str:
        config = self.config
        if config.model_topo.parts is None:  # a plan is one of a pipeline
            return ""
        basis, _ = Basis.of_run(config, self.spec, Workload.of(self.loader, config), this_device())
        plan = Plan.make(basis)
        line = f"; --plan says {_gib(plan.stages[self.stage].memory.peak)}"
        advice = next_change(plan, self.stage)
        return f"{line}; next: {advice[0]}, with which it says {_gib(advice[1])}" if advice else line


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB"

"""What a plan rests on: the run, what it is fed with, the device, and what `--calibrate` measured.

A calibration lies in the run's folder, where `parts: auto` finds it. It is a factor by which estimates are wrong, so it
stays useful when the data change; for another model, precision or kind of device it is passed over.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from models.spec import ModelSpec
from training.atomic_files import replace_text
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.metrics.devices import Device
from training.plan.activation_memory import Saved
from training.plan.workload import Workload
from training.schedule.instructions import Schedule

FILE = "calibration.json"


class Factors(BaseModel):
    """How many times as long as estimated things take on a device.

    Attributes:
        layers: forward and backward, by the number of the first layer of each kind.
        update: the optimizer's work.
    """

    layers: dict[str, tuple[float, float]] = {}
    update: float = 1.0


class Calibration(BaseModel):
    """How this machine's times differ from estimates.

    Attributes:
        device: they were measured on.
        dtype: of the run.
        model: digest of config.json.
    """

    device: str
    dtype: str
    model: str
    factors: Factors

    @classmethod
    def of(cls, config: TrainConfig, spec: ModelSpec, factors: Factors) -> Calibration:
        """As measured by this process."""
        digest = hashlib.sha256(json.dumps(spec.raw, sort_keys=True).encode()).hexdigest()
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return cls(device=device, dtype=str(training_dtype(config)), model=digest, factors=factors)

    @classmethod
    def read(cls, folder: Path, config: TrainConfig, spec: ModelSpec) -> Calibration | None:
        """What an earlier `--calibrate` left in the run's folder, where it fits this run and this kind of device."""
        try:
            found = cls.model_validate_json((folder / FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return found if found == cls.of(config, spec, found.factors) else None

    def write(self, folder: Path) -> Path:
        """Into the run's folder, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / FILE, self.model_dump_json(indent=2) + "\n")
        return folder / FILE


@dataclass(frozen=True)
class Basis:
    """What a plan rests on.

    Attributes:
        workload: what the run is fed with.
        calibration: what was measured; all is estimated where absent.
        recompute: the layers that do; as the config says, and with `auto` all, where absent.
        known: what kinds of layers were found to keep, shared by all that is made of this basis.
    """

    config: TrainConfig
    spec: ModelSpec
    workload: Workload
    device: Device
    calibration: Calibration | None = None
    recompute: frozenset[int] | None = None
    known: dict[tuple[object, ...], Saved] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def recomputed(self) -> frozenset[int]:
        return self.config.recomputed(self.spec.n_blocks) if self.recompute is None else self.recompute

    @property
    def schedule(self) -> Schedule:
        """That of the stages; where there is one, it has nothing to wait for."""
        return "dualpipev" if self.config.v_schedule else "1f1b"

    @property
    def micro_batches(self) -> int:
        """Of one replica in a step."""
        return max(self.workload.micro_batches, self.config.least_micro_batches)

    def changed(self, **keys: Any) -> Basis:
        """The same run with other keys; a step has as many rows, in as many micro-batches as that makes."""
        config, work = self.config.model_copy(update=keys), self.workload
        step = work.rows * work.micro_batches * self.config.model_topo.replicas
        rows = config.train_micro_batch_size_per_gpu
        micro_batches = max(1, math.ceil(step / (rows * config.model_topo.replicas)))
        return replace(self, config=config, workload=replace(work, rows=rows, micro_batches=micro_batches))

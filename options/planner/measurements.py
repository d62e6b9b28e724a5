"""What was measured of a run, and corrects its plans.

They lie in the run's folder: calibration.json (`--calibrate`), measured.json (`options.planner.feedback`) and
the links of `--check`. A calibration holds factors by which estimates are wrong, so it outlives a change of data, but
not of model, precision or kind of device. Measured steps count only for the same kind of step (`Basis.conditions`),
links only for the same number of stages and replicas.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from common.whole_files import Tell, kept, read_regular, replace_text
from models.checkpoint.publish import writing
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.config.precision import training_dtype

FILE = "calibration.json"
MEASURED_FILE = "measured.json"
TOWER = "tower"  # in the place of a layer's number: what sees images
ESTIMATES = 4  # version of the estimates: raise it when they change, as older factors do not fit then


class Calibration(BaseModel):
    """Measured time over estimated time, on this machine."""

    device: str
    dtype: str
    model: str  # digest of config.json and of `ESTIMATES`
    layers: dict[str, tuple[PositiveFloat, PositiveFloat]]  # forward and backward, by the first layer of each kind
    update: PositiveFloat  # of the optimizer

    @classmethod
    def of(
        cls, config: TrainConfig, spec: ModelSpec, layers: dict[str, tuple[float, float]], update: float
    ) -> Calibration:
        """Make the calibration of this process's device."""
        model = model_digest(spec)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return cls(device=device, dtype=str(training_dtype(config)), model=model, layers=layers, update=update)

    def least(self, other: Calibration) -> Calibration:
        """Take the smaller of two measurements, as other programs can only add time."""
        layers = {
            kind: (min(forward, other.layers[kind][0]), min(backward, other.layers[kind][1]))
            for kind, (forward, backward) in self.layers.items()
        }
        return self.model_copy(update={"layers": layers, "update": min(self.update, other.update)})

    @classmethod
    def read(cls, folder: Path, config: TrainConfig, spec: ModelSpec, tell: Tell) -> Calibration | None:
        """Read the run's folder; None without a calibration that fits this run and this kind of device."""
        found = kept(folder / FILE, cls.model_validate_json, read_regular, tell)
        return found if found and found == cls.of(config, spec, found.layers, found.update) else None

    def write(self, folder: Path) -> Path:
        """Write it into the run's folder, whole or not at all; CheckpointError where that cannot be written."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / FILE, self.model_dump_json(indent=2) + "\n")
        return folder / FILE


class Measured(BaseModel):
    """Measurements of a run's first steps."""

    conditions: dict[str, Any]  # what they depend on (`Basis.conditions`)
    steps: tuple[int, int]  # first and last one
    parts: list[PositiveInt]
    seconds: list[PositiveFloat]  # of each stage for a micro-batch
    peaks: list[PositiveInt]  # most bytes of each stage
    layers: list[PositiveFloat]  # measured over estimated time of each layer
    beyond: list[NonNegativeInt]  # bytes of each stage above its plan; 0 below it, as longer rows may still come
    better: list[PositiveInt] | None = None  # a faster stage split, if any
    moves: int = 0  # how often the run was rebalanced

    @model_validator(mode="after")
    def _fits_together(self) -> Measured:
        better = self.better or self.parts
        if not len(self.layers) == sum(self.parts) == sum(better) or len(better) != len(self.parts):
            raise ValueError("expected parts of as many layers")
        return self


def model_digest(spec: ModelSpec) -> str:
    """Return what tells a model's estimates from others."""
    return digest([ESTIMATES, spec.raw, *([TOWER] if spec.family.sees else [])])


def digest(values: Any) -> str:
    """Return the digest of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

"""What a plan rests on: the run, what it is fed with, the device, and what was measured of it.

What `--calibrate`, `--check` and a run's own steps (`training.plan.feedback`) measured lies in the run's folder, where
`parts: auto` and `--plan` find it. A calibration is a factor by which estimates are wrong, so it stays useful when the
data change; for another model, precision or kind of device it is passed over. What steps took counts for just such
steps, and the speed of links for as many stages and replicas.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from common.whole_files import Tell, kept, read_regular, replace_text
from models.checkpoint.publish import writing
from models.spec import ModelSpec
from models.tensor_parallel import part_shapes
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.distributed.links import Links
from training.metrics.devices import Device
from training.plan.fabric import Fabric
from training.plan.workload import Workload, divided
from training.schedule.instructions import Schedule

Found = TypeVar("Found")

FILE = "calibration.json"
MEASURED_FILE = "measured.json"
ESTIMATES = 3  # one more whenever costs are estimated in another way: the factors of before do not fit then
# What the times of stages and their memory depend on, besides device, model, data and torch.
DEPENDS = (
    "use_flash_attn use_grad_ckpt offload_activations schedule zero_optimization bf16 fp16 fp8 tf32 data_types"
).split()


class Calibration(BaseModel):
    """How many times as long as estimated things take on this machine.

    Attributes:
        device: that was measured.
        dtype: of the run.
        model: digest of config.json, and of the way to estimate.
        layers: of forward and backward, by the number of the first layer of each kind.
        update: of the optimizer's work.
    """

    device: str
    dtype: str
    model: str
    layers: dict[str, tuple[PositiveFloat, PositiveFloat]]
    update: PositiveFloat

    @classmethod
    def of(
        cls, config: TrainConfig, spec: ModelSpec, layers: dict[str, tuple[float, float]], update: float
    ) -> Calibration:
        """As measured by this process."""
        digest = _digest([ESTIMATES, spec.raw])
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return cls(device=device, dtype=str(training_dtype(config)), model=digest, layers=layers, update=update)

    def least(self, other: Calibration) -> Calibration:
        """Of two of the same, as what else the machine does can only add."""
        layers = {
            kind: (min(forward, other.layers[kind][0]), min(backward, other.layers[kind][1]))
            for kind, (forward, backward) in self.layers.items()
        }
        return self.model_copy(update={"layers": layers, "update": min(self.update, other.update)})

    @classmethod
    def read(cls, folder: Path, config: TrainConfig, spec: ModelSpec, tell: Tell) -> Calibration | None:
        """What an earlier `--calibrate` left in the run's folder, where it fits this run and this kind of device."""
        found = kept(folder / FILE, cls.model_validate_json, read_regular, tell)
        return found if found and found == cls.of(config, spec, found.layers, found.update) else None

    def write(self, folder: Path) -> Path:
        """Into the run's folder, whole or not at all; CheckpointError where that cannot be written."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / FILE, self.model_dump_json(indent=2) + "\n")
        return folder / FILE


class Measured(BaseModel):
    """What the first steps of a run took, beside its plan.

    Attributes:
        conditions: what that depends on (`Basis.conditions`).
        steps: the first and the last one.
        parts: of the run.
        seconds: of each stage for a micro-batch.
        peaks: bytes that each stage had at most.
        layers: how many times as long as estimated each layer takes.
        beyond: bytes that each stage has at most beyond its plan; none below it, as longer rows may still come.
        better: the parts with which a step would be faster, if any.
        moves: how often a run took better parts.
    """

    conditions: dict[str, Any]
    steps: tuple[int, int]
    parts: list[PositiveInt]
    seconds: list[PositiveFloat]
    peaks: list[PositiveInt]
    layers: list[PositiveFloat]
    beyond: list[NonNegativeInt]
    better: list[PositiveInt] | None = None
    moves: int = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Measured:
        better = self.better or self.parts
        if not len(self.layers) == sum(self.parts) == sum(better) or len(better) != len(self.parts):
            raise ValueError("parts of as many layers")
        return self


@dataclass(frozen=True)
class Basis:
    """What a plan rests on.

    Attributes:
        workload: what the run is fed with.
        calibration: what `--calibrate` measured; all is estimated where absent.
        measured: what steps of this run took, which corrects the plan.
        links: what `--check` measured; as the device's neighbours are linked where absent.
        named: what `--links` says, which counts for more.
        recompute: the layers that do; as the config says, and with `auto` all, where absent.
        known: what `once` found, shared by all that is made of this basis.
    """

    config: TrainConfig
    spec: ModelSpec
    workload: Workload
    device: Device
    calibration: Calibration | None = None
    measured: Measured | None = None
    links: Links | None = None
    named: Fabric | None = None
    recompute: frozenset[int] | None = None
    known: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_run(
        cls, config: TrainConfig, spec: ModelSpec, workload: Workload, device: Device, calibrated: bool = True
    ) -> tuple[Basis, list[str]]:
        """With what was measured in the run's folder, and a line for the log where that cannot be used.

        Args:
            calibrated: whether a calibration, and measured links, count.
        """
        folder = Path(config.save_path)
        basis, told = cls(config, spec, workload, device), list[str]()
        if calibrated:
            calibration = Calibration.read(folder, config, spec, told.append)
            basis = replace(basis, calibration=calibration, links=Links.read(folder, told.append))
        measured = kept(folder / MEASURED_FILE, Measured.model_validate_json, read_regular, told.append)
        if measured is None:
            return basis, told
        then, now = measured.conditions, basis.conditions
        if other := [key for key in now if then.get(key) != now[key]]:
            key = other[0]
            values = "" if key in ("model", "calibration") else f": {then.get(key)} then, {now[key]} now"
            return basis, [*told, f"{MEASURED_FILE} is passed over: measured with another {key}{values}"]
        return replace(basis, measured=measured), told

    @property
    def conditions(self) -> dict[str, Any]:
        """What measured steps depend on, as it stands in JSON."""
        settings = self.config.dump()
        return {
            "device": self.device.name,
            "torch": torch.__version__,
            "model": _digest([ESTIMATES, self.spec.raw]),
            "calibration": _digest(vars(self.calibration) if self.calibration else None),
            "rows": self.workload.rows,
            "length": math.ceil(self.workload.length),
            "compile": self.config.compiles(self.device.ampere, self.spec.has_experts),
            "optimizer": self.config.optimizer.type,
            "sharing": [self.config.model_topo.sequence, self.config.model_topo.tensor],
            **{key: settings.get(key) for key in DEPENDS},
        }

    def once(self, find: Callable[..., Found], *case: object) -> Found:
        """What `find` tells of a layer of the model, asked once for all that is made of this basis."""
        asked = find, *case
        if asked not in self.known:
            self.known[asked] = find(self.spec, *case)
        found: Found = self.known[asked]
        return found

    @cached_property
    def recomputed(self) -> frozenset[int]:
        return self.config.recomputed(self.spec.n_blocks) if self.recompute is None else self.recompute

    @property
    def in_fp8(self) -> bool:
        """Whether the linear layers of the blocks multiply in fp8, which the device must have."""
        return self.config.fp8.enabled and self.device.fp8 > 0

    @property
    def schedule(self) -> Schedule:
        """That of the stages; where there is one, it has nothing to wait for."""
        return "dualpipev" if self.config.v_schedule else "1f1b"

    @property
    def micro_batches(self) -> int:
        """Of one replica in a step."""
        return max(self.workload.micro_batches, self.config.least_micro_batches)

    @property
    def measured_links(self) -> Links | None:
        """Those of as many stages and replicas."""
        return self.links if self.links and not self.named and self.links.fit(self.config.model_topo) else None

    @property
    def fabric(self) -> Fabric:
        return self.named or Fabric.of(self.device)

    @cached_property
    def share(self) -> Workload:
        """What one of the processes with the same rows is fed with."""
        return self.workload.shared(self.config.model_topo.sequence)

    def shapes(self, layer: int) -> dict[str, torch.Size]:
        """Of a layer's weights, or of the part that one of the processes has that share it."""
        return self.once(part_shapes, layer, self.config.model_topo.tensor)

    @cached_property
    def parameters(self) -> list[int]:
        """Of each layer, in one process."""
        return [sum(map(prod, self.shapes(layer).values())) for layer in range(self.spec.n_layers)]

    def transfers(self, size: float) -> list[float]:
        """Seconds of a message of so many bytes from each stage to the next."""
        if self.measured_links:
            return [link.seconds(size) for link in self.measured_links.stages]
        return [link.seconds(size) for link in self.fabric.to_next(self.config.model_topo)]

    @property
    def sums_bandwidth(self) -> float:
        """Bytes/s that a process sends while the replicas of a stage sum."""
        links = self.measured_links
        if links and links.sums:
            return min(link.bandwidth for link in links.sums)
        return self.fabric.replicas(self.config.model_topo).bandwidth

    def changed(self, **keys: Any) -> Basis:
        """The same run with other keys; a step has as many rows, in as many micro-batches as that makes."""
        config, work = self.config.model_copy(update=keys), self.workload
        rows, micro_batches = divided(work.rows * work.micro_batches * self.config.model_topo.row_replicas, config)
        return replace(self, config=config, workload=replace(work, rows=rows, micro_batches=micro_batches))


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

"""The sections of a run's config: optimizer, schedule, precision, ZeRO, losses, topology."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from math import isfinite, prod
from typing import Annotated, Any, Literal

import numpy
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from data.records.sources import Source


class Section(BaseModel):
    """Keys that belong together; others are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def nearest(name: object, known: Iterable[str]) -> str:
    """Which of the names that there are is most like one that there is not."""
    return difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]


def _listed(value: Any) -> Any:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# The entry's form decides what it is, so that a complaint is about the right one.
_Entry = Annotated[
    Annotated[str, Tag("path")] | Annotated[Source, Tag("source")],
    Discriminator(lambda entry: "source" if isinstance(entry, (dict, Source)) else "path"),
]
DataPath = Annotated[list[_Entry], BeforeValidator(_listed)]


class Optimizer(Section):
    """`optimizer`: the update rule."""

    type: Literal["AdamW", "Adam", "Lion", "Adafactor", "SGD"] = "AdamW"
    # Passed to the optimizer's constructor: lr, betas, eps, weight_decay, ...
    params: dict[str, Any] = {}
    # Regular expressions; parameters whose name matches one get no weight decay.
    no_wd_kws: list[re.Pattern[str]] = []

    @model_validator(mode="after")
    def _check(self) -> Optimizer:
        numbers = ["lr", "weight_decay", "momentum"]
        if self.type != "Adafactor":  # whose eps is a pair
            numbers.append("eps")
        for name in numbers:
            value = self.params.get(name, 0.0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
                raise ValueError(f"params.{name}: expected a number of at least 0, found {value!r}")
        return self


class WarmUp(Section):
    """The warm-up that every schedule begins with; ratios are of the optimizer's lr."""

    # Steps until the full learning rate.
    warmup_num_steps: int = Field(default=0, ge=0)
    # Where the warm-up starts.
    warmup_min_ratio: float = Field(default=0.0, ge=0, le=1)
    # How the warm-up rises: linearly, or with the logarithm of the step as DeepSpeed does by default.
    warmup_type: Literal["log", "linear"] = "log"


class WarmupCosineParams(WarmUp):
    """`scheduler.params` of WarmupCosineLR."""

    # Where the cosine ends.
    cos_min_ratio: float = Field(default=0.0001, ge=0, le=1)


class LinearParams(WarmUp):
    """`scheduler.params` of linear."""

    # Where the line ends.
    min_ratio: float = Field(default=0.0001, ge=0, le=1)


class ConstantParams(WarmUp):
    """`scheduler.params` of constant."""


class WSDParams(WarmUp):
    """`scheduler.params` of WSD."""

    # Where the decay ends.
    min_ratio: float = Field(default=0.0001, ge=0, le=1)
    # The share of all steps that the decay takes, at the end.
    decay_ratio: float = Field(default=0.1, gt=0, le=1)


_SCHEDULER_PARAMS: dict[str, type[WarmUp]] = {
    "WarmupCosineLR": WarmupCosineParams,
    "linear": LinearParams,
    "constant": ConstantParams,
    "WSD": WSDParams,
}


class Scheduler(Section):
    """`scheduler`: the learning rate over the run; total_num_steps is computed from the data."""

    type: Literal["WarmupCosineLR", "linear", "constant", "WSD"] = "WarmupCosineLR"
    # Those of the type.
    params: WarmupCosineParams | LinearParams | ConstantParams | WSDParams = Field(
        default_factory=dict, validate_default=True
    )

    @field_validator("params", mode="before")
    @classmethod
    def _params_of_the_type(cls, params: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("type")
        if kind is None:  # refused already
            return params
        section = _SCHEDULER_PARAMS[kind]
        if isinstance(params, dict):
            for name in (name for name in params if name not in section.model_fields):
                near = nearest(name, section.model_fields)
                raise ValueError(f"{name}: {kind} does not have it; did you mean {near}?")
        return section.model_validate(params)


class BF16(Section):
    """`bf16`, passed to DeepSpeed, which decides what is absent."""

    enabled: bool = False
    immediate_grad_update: bool | None = None
    check_grad_overflow: bool | None = None
    bf16_master_weights_and_grads: bool | None = None
    bf16_optimizer_states: bool | None = None


class FP16(Section):
    """`fp16`, passed to DeepSpeed, which decides what is absent."""

    enabled: bool = False
    auto_cast: bool | None = None
    loss_scale: float | None = None
    initial_scale_power: int | None = None
    loss_scale_window: int | None = None
    hysteresis: int | None = None
    consecutive_hysteresis: bool | None = None
    min_loss_scale: int | None = None
    fp16_master_weights_and_grads: bool | None = None


class FP8(Section):
    """`fp8`: products of the blocks' linear layers in 8 bits (`models.fp8`)."""

    enabled: bool = False


class OptimizerOffload(BaseModel):
    """Where the optimizer's states lie. Those on a disk (`nvme`) could not be taken up from a checkpoint."""

    model_config = ConfigDict(extra="allow")
    device: Literal["none", "cpu"] = "none"


class Zero(BaseModel):
    """`zero_optimization`: passed to DeepSpeed; stage 1 shards the optimizer over the replicas of a stage."""

    model_config = ConfigDict(extra="allow")
    stage: int = Field(default=1, ge=0, le=3)
    offload_optimizer: OptimizerOffload | None = None

    @property
    def offloads(self) -> bool:
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"


class ZLoss(Section):
    """`aux_max_z_loss`: adds weight * mean of (max log-softmax)^2, which keeps logits from drifting."""

    weight: float = Field(default=0.0, ge=0)


class RouterLoss(Section):
    """`aux_router_loss`: the load-balancing loss of mixture-of-experts models."""

    # As transformers would with the model's config.json where absent: its router_aux_loss_coef if it says
    # output_router_logits, else none.
    weight: float | None = Field(default=None, ge=0)


class TensorBoard(Section):
    """`tensorboard`: curves in save_path/tensorboard."""

    enabled: bool = True


class WandB(Section):
    """`wandb`: curves on Weights & Biases, where its package is installed and a key is set."""

    enabled: bool = False
    project: str = "pipetune"
    name: str | None = None


Port = Annotated[int, Field(ge=1, le=65535)]


class Ports(Section):
    """`ports`: where rank 0's host listens to the others."""

    # Where the ranks meet; the launcher's choice where absent.
    meeting: Port | None = None
    # Where each rank is connected to the failure detector; any free one where absent.
    failure_detector: Port | None = None

    @model_validator(mode="after")
    def _check(self) -> Ports:
        if self.meeting and self.meeting == self.failure_detector:
            raise ValueError(f"failure_detector: {self.meeting} is that of meeting; expected another one")
        return self


class EveryNth(Section):
    """`use_grad_ckpt: {every: n}`: every n-th block recomputes."""

    every: int = Field(ge=1)


class ProcessTopology(Section):
    """`model_topo.process_topology`: the grid of processes."""

    # What neighbouring processes are: the last axis. Over several hosts, where absent, what crosses them least.
    axes: list[Literal["pipe", "data"]] = ["pipe", "data"]
    # One size per axis: [8, 2] is 16 processes, two replicas of an 8-stage pipeline.
    dims: list[PositiveInt] = Field(default=[1, 1], min_length=2, max_length=2)

    @model_validator(mode="after")
    def _check(self) -> ProcessTopology:
        if sorted(self.axes) != ["data", "pipe"]:
            raise ValueError(f"axes: expected pipe and data, found {self.axes}")
        return self


class ModelTopo(Section):
    """`model_topo`: how the model is spread."""

    process_topology: ProcessTopology = ProcessTopology()
    # Layers per stage (embedding + blocks + head); where absent or `auto`, what makes the slowest stage fastest.
    parts: list[PositiveInt] | None = None

    @field_validator("parts", mode="before")
    @classmethod
    def _auto_is_none(cls, parts: Any) -> Any:
        if parts is not None and not isinstance(parts, list) and parts != "auto":
            raise ValueError("expected auto or a list of layers per stage")
        return None if parts == "auto" else parts

    @property
    def stages(self) -> int:
        return self._sizes["pipe"]

    @property
    def replicas(self) -> int:
        return self._sizes["data"]

    @property
    def processes(self) -> int:
        return prod(self.process_topology.dims)

    def stage_of(self, rank: int) -> int:
        """The stage that a process runs; the first of the axes changes slowest."""
        grid = self.process_topology
        return int(numpy.unravel_index(rank, grid.dims)[grid.axes.index("pipe")])

    def spread(self, stages: int, replicas: int) -> ModelTopo:
        """The same over other processes, with `parts: auto`."""
        dims = [stages if axis == "pipe" else replicas for axis in self.process_topology.axes]
        grid = self.process_topology.model_copy(update={"dims": dims})
        return self.model_copy(update={"parts": None, "process_topology": grid})

    def turned(self) -> ModelTopo:
        """The same grid with its axes, and `dims` with them, in the other order."""
        grid = self.process_topology
        turned = grid.model_copy(update={"axes": grid.axes[::-1], "dims": grid.dims[::-1]})
        return self.model_copy(update={"process_topology": turned})

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.process_topology.axes, self.process_topology.dims, strict=True))

"""Sections of a config for the update of the weights: optimizer, learning rate, ZeRO."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationInfo, field_validator, model_validator
from typing_extensions import TypedDict

from training.config.section import Section, expected, suggest

Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(strict=True, ge=0, lt=1)]
# Parameters that optimizers read as a condition, so that the word 'false' would turn them on.
SWITCHES = set("amsgrad maximize nesterov foreach fused capturable differentiable adamw_mode bias_correction".split())


class OptimizerParams(TypedDict, total=False):
    """The parameters that several optimizers have."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    lr: Number
    weight_decay: Number
    momentum: Number
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)]
    eps: Annotated[Number | list[Number | None], expected("a number of at least 0, or two for Adafactor")]


class Optimizer(Section):
    """`optimizer`: the update rule."""

    type: Literal["AdamW", "Adam", "Lion", "Adafactor", "SGD"] = "AdamW"
    """`AdamW`, `Adam`, `Lion`, `Adafactor` or `SGD`. `Adafactor` keeps next to nothing, but needs fp32 and stage 0
    (docs/memory-and-speed.md#when-memory-is-short)."""

    params: dict[str, Any] = {}
    """Passed to the optimizer: `betas`, `eps`, `weight_decay`, ... and `lr`, which is required."""

    no_wd_kws: list[re.Pattern[str]] = []
    """Regular expressions; parameters whose names match one get no weight decay."""

    @field_validator("params", mode="before", json_schema_input_type=OptimizerParams)
    @classmethod
    def _check_params(cls, params: Any) -> Any:
        TypeAdapter(OptimizerParams).validate_python(params)
        for name in SWITCHES & params.keys():
            if not isinstance(params[name], bool):
                raise ValueError(f"{name}: expected true or false")
        return params


class WarmUp(Section):
    """The warm-up of every schedule; ratios are of the optimizer's lr."""

    warmup_num_steps: int = Field(default=0, ge=0)
    """Steps until the full learning rate."""

    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Instead of `warmup_num_steps`: the share of the run's steps that the warm-up takes, rounded up."""

    warmup_min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the warm-up starts, as a share of `lr`."""

    warmup_type: Literal["log", "linear"] = "log"
    """How the warm-up rises: in a straight line (`linear`), or with the logarithm of the step (`log`), as DeepSpeed
    does by default."""

    @model_validator(mode="after")
    def _check_length(self) -> WarmUp:
        if self.warmup_num_steps and self.warmup_ratio:
            raise ValueError("warmup_num_steps and warmup_ratio are one length; expected only one of them")
        return self


class WarmupCosineParams(WarmUp):
    """`scheduler.params` of WarmupCosineLR."""

    cos_min_ratio: float = Field(default=0.0001, ge=0, le=1)
    """`WarmupCosineLR`: where the cosine ends, as a share of `lr`."""


class LinearParams(WarmUp):
    """`scheduler.params` of linear."""

    min_ratio: float = Field(default=0.0001, ge=0, le=1)
    """`linear` and `WSD`: where the fall ends, as a share of `lr`."""


class ConstantParams(WarmUp):
    """`scheduler.params` of constant."""


class WSDParams(LinearParams):
    """`scheduler.params` of WSD."""

    decay_ratio: float = Field(default=0.1, gt=0, le=1)
    """`WSD`: the share of all steps that the decay takes, at the end."""


_SCHEDULER_PARAMS: dict[str, type[WarmUp]] = {
    "WarmupCosineLR": WarmupCosineParams,
    "linear": LinearParams,
    "constant": ConstantParams,
    "WSD": WSDParams,
}


class Scheduler(Section):
    """`scheduler`: the learning rate over the run; total_num_steps is computed from the data."""

    type: Literal["WarmupCosineLR", "linear", "constant", "WSD"] = "WarmupCosineLR"
    """After the warm-up, `WarmupCosineLR` falls along half a cosine, `linear` along a straight line, `constant` stays,
    and `WSD` (warm-up, stable, decay) stays and falls at the end, by 1 - √ of the decay's progress. `total_num_steps`
    is computed from the data."""

    params: WarmupCosineParams | LinearParams | ConstantParams | WSDParams = Field(
        default_factory=dict, validate_default=True
    )

    @field_validator("params", mode="before")
    @classmethod
    def _check_params(cls, params: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("type")
        if kind is None:  # an error already
            return params
        section = _SCHEDULER_PARAMS[kind]
        if isinstance(params, dict):
            for name in (name for name in params if name not in section.model_fields):
                hint = suggest(name, section.model_fields, "scheduler.params")
                raise ValueError(f"{name}: {kind} does not have it{hint}")
        return section.model_validate(params)


class OptimizerOffload(BaseModel):
    """Where the optimizer's states lie. Those on a disk (`nvme`) could not be taken up from a checkpoint."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    device: Literal["none", "cpu"] = "none"
    """`cpu` keeps the optimizer's states in the CPU's memory. A disk (`nvme`) is refused, as no checkpoint of it could
    be taken up."""


class Zero(BaseModel):
    """`zero_optimization`: passed to DeepSpeed; stage 1 shards the optimizer over the replicas of a stage."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    stage: int = Field(default=1, ge=0, le=3)
    """`0` or `1` in a pipeline; stage 1 shards the optimizer over the replicas. 2 and 3 are for `train_ds_zero.py`."""

    offload_optimizer: OptimizerOffload | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_up(cls, value: Any) -> Any:
        """Read `cpu_offload: true` as `offload_optimizer: {device: cpu}`."""
        if not isinstance(value, dict) or not isinstance(value.get("cpu_offload"), bool):
            return value
        rest = {key: each for key, each in value.items() if key != "cpu_offload"}
        return {"offload_optimizer": {"device": "cpu"}} | rest if value["cpu_offload"] else rest

    @property
    def offloads(self) -> bool:
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"

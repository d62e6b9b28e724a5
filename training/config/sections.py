"""Sections of a config: optimizer, schedule, precision, ZeRO, losses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from data.paths import with_home
from data.records.sources import Source
from training.config.foreign_names import FOREIGN

ALIKE = 0.8  # the share of letters that a misspelt name and the one that was meant have in common
FEW = 12  # names that fit into a message


class Section(BaseModel):
    """Keys that belong together; others are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """Read `bf16: true` as `bf16: {enabled: true}`."""
        if "enabled" not in cls.model_fields or isinstance(value, (dict, cls)):
            return value
        if not isinstance(value, bool):
            raise ValueError("expected true, false or {enabled: true}")
        return {"enabled": value}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Take the same in an editor."""
        schema = handler(core_schema)
        return {"anyOf": [{"type": "boolean"}, schema]} if "enabled" in cls.model_fields else schema

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `save_interval: yes`, which pydantic reads as 1."""
        kinds = list(_kinds(cls.model_fields[str(info.field_name)].annotation))
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError("expected a number")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield a type and those that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """List the sections that a field's type names."""
    return [kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def expected(words: str) -> WrapValidator:
    """Describe a union of types in one phrase; pydantic would report an error for each of its types."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"expected {words}") from None

    return WrapValidator(check)


def suggest(name: object, known: Iterable[str], section: str = "") -> str:
    """Suggest the key that was meant, or list those that there are."""
    known, prefix = list(known), f"{section}." if section else ""
    key, advice, _ = FOREIGN.get(str(name).lower().replace("-", "_"), (None, "", []))
    if key == "" and not section:
        return f"; no such thing here: {advice}"
    if key and key != f"{prefix}{name}" and section.partition(".")[0] in ("", key.partition(".")[0]):
        return f"; did you mean {key}?{f' ({advice})' if advice else ''}"
    if near := get_close_matches(str(name), known, n=1, cutoff=ALIKE):
        return f"; did you mean {prefix}{near[0]}?"
    return f"; expected one of {', '.join(known)}" if len(known) <= FEW else ""


# `~` becomes the home folder, as no shell expands it in a file.
PathText = Annotated[str, AfterValidator(with_home)]
NewPathText = Annotated[str, Field(min_length=1), AfterValidator(with_home)]


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# The form of an entry decides its type, so that an error is about the right one.
_Entry = Annotated[
    Annotated[str, Tag("path")] | Annotated[Source, Tag("source")],
    Discriminator(lambda entry: "source" if isinstance(entry, (dict, Source)) else "path"),
]
DataPath = Annotated[list[_Entry], BeforeValidator(_as_list, json_schema_input_type=_Entry | list[_Entry])]

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


class LoraSection(Section):
    """`lora`: train low-rank adapters instead of the weights, with peft's meanings."""

    r: int = Field(default=8, ge=1)
    """The rank of the adapters; wherever `lora` is given they are trained instead of the weights (docs/adapters.md)."""

    alpha: float = Field(default=8, gt=0)
    """The adapters count `alpha / r`, or `alpha / sqrt(r)` with `rslora`."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of what enters the adapters; 0 where experts have them."""

    rslora: bool = False
    """Scale by the square root of `r` (arXiv:2312.03732)."""

    lr_ratio: float = Field(default=1.0, gt=0)
    """Factor of the learning rate of B (LoRA+, arXiv:2402.12354, which takes 16)."""

    targets: Annotated[
        str | list[str], Field(min_length=1), expected("all-linear, a list of names, or a regular expression")
    ] = "all-linear"
    """Which modules get an adapter: all linear layers but the head (`all-linear`); those whose names end with one of a
    list, such as `[q_proj, v_proj]`; or those whose whole names match a regular expression. Weights of experts are
    named as modules are: `experts.down_proj`."""

    experts: bool = True
    """Whether weights of experts get adapters too, where `targets` includes them."""

    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter, such as `[embed_tokens, lm_head]`."""

    base: Literal["nf4", "fp8"] | None = None
    """`nf4`: hold the weights of the blocks under the adapters in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes
    (`pip install bitsandbytes`); embedding, norms, routers and head stay in 16 bits. `fp8`: hold the weights that
    `model_path` stores in fp8 as they are, in 8 bits. Without the key all are held in 16 bits."""

    start_from: PathText | None = None
    """Start from this adapter instead of a fresh one: a folder of peft's, or the folder of a run."""


BETA = 0.1


UNPAIRED = ("kto", "apo_zero_unpaired")


class PreferenceSection(Section):
    """`preference`: learn from pairs of answers, or from good and bad ones (docs/preferences.md)."""

    loss: Literal["dpo", "cdpo", "ipo", "simpo", "orpo", "kto", "apo_zero_unpaired", "reward"] = "dpo"
    """`dpo` (arXiv:2305.18290), `cdpo` (dpo with `label_smoothing`), `ipo` (arXiv:2310.12036), `simpo`
    (arXiv:2405.14734) or `orpo` (arXiv:2403.07691); the last two need no reference model. `kto` (arXiv:2402.01306) and
    `apo_zero_unpaired` (arXiv:2408.06266) learn from single answers that are marked as desirable or not
    (docs/preferences.md#single-answers). `reward` trains a reward model, which gives an answer a number
    (docs/preferences.md#reward-models-and-classes)."""

    beta: float = Field(default=BETA, gt=0)
    """How much a difference of log-probabilities counts; for `orpo` the weight of its odds ratio. SimPO's authors take
    2 to 2.5."""

    label_smoothing: float | None = Field(default=None, ge=0, lt=0.5)
    """`cdpo`: the share of pairs that are expected to be the wrong way round; 0.1 where left out."""

    gamma: float | None = Field(default=None, ge=0)
    """`simpo`: the margin by which `beta` times the difference should exceed 0; 0.5 where left out."""

    desirable_weight: float | None = Field(default=None, gt=0)
    """`kto` and `apo_zero_unpaired`: weight of the loss of a desirable answer; 1 where left out."""

    undesirable_weight: float | None = Field(default=None, gt=0)
    """`kto` and `apo_zero_unpaired`: weight of the loss of an undesirable answer; 1 where left out."""

    center_weight: float = Field(default=0.0, ge=0)
    """`reward`: weight of the squared sum of a pair's rewards, which keeps them around 0."""

    sft_weight: float | None = Field(default=None, ge=0)
    """Weight of the cross-entropy of the better answers, a mean over their tokens; 1 for `orpo`, 0 for the others where
    left out."""

    length_normalised: bool | None = None
    """Whether the log-probability of an answer is divided by its tokens; true for `ipo`, `simpo` and `orpo`, false for
    the others where left out."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model as it was before training."""
        return self.loss in ("dpo", "cdpo", "ipo", *UNPAIRED)

    @property
    def unpaired(self) -> bool:
        """Whether each answer is marked by itself."""
        return self.loss in UNPAIRED

    @property
    def objective(self) -> dict[str, Any]:
        """The arguments of `models.preference.Objective`."""
        return self.model_dump(exclude={"center_weight"}, exclude_none=True)

    @model_validator(mode="after")
    def _fill_in(self) -> PreferenceSection:
        """Set what depends on the loss; refuse what it does not use."""
        for key, loss, usual in (("label_smoothing", "cdpo", 0.1), ("gamma", "simpo", 0.5)):
            if self.loss != loss and getattr(self, key):
                raise ValueError(f"{key}: expected only with loss: {loss}, as {self.loss} does not use it")
            if getattr(self, key) is None:
                setattr(self, key, usual if self.loss == loss else 0.0)
        for key in ("desirable_weight", "undesirable_weight"):
            if not self.unpaired and getattr(self, key) is not None:
                raise ValueError(f"{key}: expected only with loss: kto or apo_zero_unpaired, not with {self.loss}")
            if self.unpaired and getattr(self, key) is None:
                setattr(self, key, 1.0)
        if self.unpaired and (self.sft_weight or self.length_normalised):
            raise ValueError(f"sft_weight and length_normalised: {self.loss} has no use for them; leave them out")
        if self.loss != "reward" and self.center_weight:
            raise ValueError(f"center_weight: expected only with loss: reward, as {self.loss} does not use it")
        if self.loss == "reward" and (self.beta != BETA or self.sft_weight or self.length_normalised):
            raise ValueError(
                "beta, sft_weight and length_normalised: a reward model has no use for them; leave them out"
            )
        if self.sft_weight is None:
            self.sft_weight = float(self.loss == "orpo")
        if self.length_normalised is None:
            self.length_normalised = self.loss in ("ipo", "simpo", "orpo")
        return self


class DistillationSection(Section):
    """`distillation`: learn from the probabilities of a larger model too (docs/distillation.md)."""

    teacher: PathText
    """The teacher: a model folder of either layout, a run, or a name on the HuggingFace hub, as in `model_path`, of the
    same vocabulary. Before the first step it is loaded alone, divided among the processes of this run, says what it
    finds of each trained token, and leaves the memory (docs/distillation.md)."""

    top_k: int = Field(default=64, ge=1)
    """How many words of each trained token the teacher's probabilities are kept of, the most probable ones; 8 bytes
    each, in `cache_dir`."""

    weight: float = Field(default=1.0, gt=0, le=1)
    """The share of the distillation in the loss; that of the cross-entropy is 1 minus it."""

    temperature: float = Field(default=1.0, gt=0)
    """What the logits of teacher and student are divided by before they are compared; above 1 the less probable words
    count more."""


class WarmUp(Section):
    """The warm-up of every schedule; ratios are of the optimizer's lr."""

    warmup_num_steps: int = Field(default=0, ge=0)
    """Steps until the full learning rate."""

    warmup_min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the warm-up starts, as a share of `lr`."""

    warmup_type: Literal["log", "linear"] = "log"
    """How the warm-up rises: in a straight line (`linear`), or with the logarithm of the step (`log`), as DeepSpeed
    does by default."""


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


class BF16(Section):
    """`bf16`, passed to DeepSpeed, which decides what is absent."""

    enabled: bool = False
    """Compute in bf16 and keep fp32 copies of the weights; at most one of bf16 and fp16. With neither the run is in
    fp32."""

    immediate_grad_update: bool | None = None
    """DeepSpeed's own; always on."""

    check_grad_overflow: bool | None = None
    """DeepSpeed's own; always on."""

    bf16_master_weights_and_grads: bool | None = None
    """DeepSpeed's own: keep the weights of the optimizer in bf16 too."""

    bf16_optimizer_states: bool | None = None
    """DeepSpeed's own: keep the states of the optimizer in bf16 too."""


class FP16(Section):
    """`fp16`, passed to DeepSpeed, which decides what is absent."""

    enabled: bool = False
    """Compute in fp16 and keep fp32 copies of the weights; for GPUs without bf16, such as V100 and T4; not with ZeRO
    stage 0, but for weight streaming."""

    auto_cast: bool | None = None
    """DeepSpeed's own; no effect here."""

    fused_optimizer: bool | None = None
    """gdGPT's; no effect here."""

    loss_scale: float | None = Field(default=None, ge=0)
    """DeepSpeed's own: a fixed loss scale; 0, or without the key, a dynamic one."""

    initial_scale_power: int | None = Field(default=None, le=127)
    """DeepSpeed's own: the dynamic loss scale begins at two to the power of this."""

    loss_scale_window: int | None = Field(default=None, gt=0)
    """DeepSpeed's own: after so many steps without an overflow the loss scale is doubled."""

    hysteresis: int | None = None
    """DeepSpeed's own: after so many overflows the loss scale is halved."""

    consecutive_hysteresis: bool | None = None
    """DeepSpeed's own: a step without an overflow starts that count anew."""

    min_loss_scale: int | None = Field(default=None, gt=0)
    """DeepSpeed's own: where the loss scale stops falling."""

    fp16_master_weights_and_grads: bool | None = None
    """DeepSpeed's own: keep the weights of the optimizer in fp16 too."""


Precision = Literal["fp32", "bf16", "fp16"]


class DataTypes(Section):
    """`data_types`, passed to DeepSpeed."""

    grad_accum_dtype: Precision
    """DeepSpeed's own: the dtype in which gradients are summed, `fp32`, `bf16` or `fp16`."""


class FP8(Section):
    """`fp8`: products of the blocks' linear layers in 8 bits (`models.block_options`)."""

    enabled: bool = False
    """In a bf16 run: the products of the blocks' linear layers in fp8, by torchao (`pip install torchao==0.18.0`), on
    GPUs from Ada and Hopper on. Faster where blocks are compiled and layers are wide (docs/performance.md#fp8);
    coarser: 3 bits after the leading one, 2 for gradients, while sums, weights, checkpoints and exports stay those of a
    bf16 run. Not with experts, a `model` axis, ZeRO stage 3, `dualpipev`, or layers whose sizes are no multiples of
    16."""


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


class ZLoss(Section):
    """`aux_max_z_loss`: adds weight * mean of (max log-softmax)^2, which keeps logits from drifting."""

    weight: float = Field(default=0.0, ge=0)
    """Adds weight x mean of (max log-softmax)² to the loss, which keeps logits from drifting."""


class RouterLoss(Section):
    """`aux_router_loss`: the load-balancing loss of mixture-of-experts models."""

    weight: float | None = Field(default=None, ge=0)
    """Mixture of experts only: the weight of the router loss (docs/models.md#the-router-loss). Without the key it is
    `router_aux_loss_coef` where config.json says `output_router_logits`, else there is none; `0.0` turns it off in any
    case."""


class TrackerSwitch(Section):
    """A tracker of `trackers`."""

    enabled: bool | None = Field(default=None, exclude=True)
    """`true` adds it to `trackers`, `false` takes it out."""


class TrackerProject(TrackerSwitch):
    """A tracker of `trackers`, and where its runs appear."""

    project: str = "pipetune"
    """The project, or experiment, that the run appears in."""

    name: str | None = None
    """The run's name there."""


Port = Annotated[int, Field(ge=1, le=65535)]


class Ports(Section):
    """`ports`: where rank 0's host listens to the others."""

    meeting: Port | None = None
    """On rank 0's host: where the ranks meet, for firewalls. Without the key the launcher's choice."""

    failure_detector: Port | None = None
    """On rank 0's host: where they notice that one is lost. Without the key any free one."""

    @model_validator(mode="after")
    def _check(self) -> Ports:
        if self.meeting and self.meeting == self.failure_detector:
            raise ValueError(f"failure_detector: {self.meeting} is that of meeting; expected another one")
        return self

"""The one YAML file of a run: every key, its meaning, its default, its check.

A key is either Pipetune's, checked here, or DeepSpeed's own, passed through as it is; anything else is refused with the
nearest name. `key.sub=value` words on the command line override the file. The resolved config is saved with the run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from data.prompts import PromptFormat
from training.errors import ConfigError

# DeepSpeed's top-level keys that a pipeline run can use (docs: deepspeed.ai/docs/config-json).
DEEPSPEED_KEYS = frozenset(
    "activation_checkpointing aio amp checkpoint comms_logger communication_data_type compile csv_monitor data_types "
    "disable_allgather dump_state flops_profiler gradient_accumulation_steps gradient_predivide_factor "
    "memory_breakdown pipeline prescale_gradients sparse_gradients tensorboard torch_autocast wall_clock_breakdown "
    "wandb".split()
)


ALIASES = {"n_epochs": "n_epoches"}  # other spellings of our own keys


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Optimizer(_Section):
    """`optimizer`: the update rule."""

    type: Literal["AdamW", "Adam", "Lion", "SGD"] = "AdamW"
    # Passed to the optimizer's constructor: lr, betas, eps, weight_decay, ...
    params: dict[str, Any] = {}
    # Regular expressions; parameters whose name matches one get no weight decay.
    no_wd_kws: list[str] = []

    @model_validator(mode="after")
    def _check(self) -> Optimizer:
        for pattern in self.no_wd_kws:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"no_wd_kws: {pattern!r} is not a regular expression: {error}") from None
        for name in ("lr", "weight_decay", "eps", "momentum"):
            value = self.params.get(name, 0.0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ValueError(f"params.{name}: expected a number of at least 0, found {value!r}")
        return self


class SchedulerParams(_Section):
    """`scheduler.params`: ratios are of the optimizer's lr."""

    # Steps until the full learning rate.
    warmup_num_steps: int = Field(default=0, ge=0)
    # Where the warm-up starts.
    warmup_min_ratio: float = Field(default=0.0, ge=0, le=1)
    # How the warm-up rises: linearly, or with the logarithm of the step as DeepSpeed does by default.
    warmup_type: Literal["log", "linear"] = "log"
    # Where the cosine ends.
    cos_min_ratio: float = Field(default=0.0001, ge=0, le=1)


class Scheduler(_Section):
    """`scheduler`: the learning rate over the run; total_num_steps is computed from the data."""

    type: Literal["WarmupCosineLR"] = "WarmupCosineLR"
    params: SchedulerParams = SchedulerParams()


class HalfPrecision(BaseModel):
    """`bf16` and `fp16`: `enabled` and whatever else DeepSpeed takes there."""

    model_config = ConfigDict(extra="allow")
    enabled: bool = False


class Zero(BaseModel):
    """`zero_optimization`: passed to DeepSpeed; stage 1 shards the optimizer over the replicas of a stage."""

    model_config = ConfigDict(extra="allow")
    stage: int = Field(default=1, ge=0, le=3)
    offload_optimizer: dict[str, Any] | None = None

    @property
    def offloads(self) -> bool:
        return (self.offload_optimizer or {}).get("device", "none") != "none"


class ZLoss(_Section):
    """`aux_max_z_loss`: adds weight * mean of (max log-softmax)^2, which keeps logits from drifting."""

    weight: float = Field(default=0.0, ge=0)


class ProcessTopology(_Section):
    """`model_topo.process_topology`: the grid of processes."""

    axes: list[Literal["pipe", "data"]] = ["pipe", "data"]
    # One size per axis: [8, 2] is 16 processes, two replicas of an 8-stage pipeline.
    dims: list[int] = [1, 1]

    @model_validator(mode="after")
    def _check(self) -> ProcessTopology:
        if sorted(self.axes) != ["data", "pipe"]:
            raise ValueError(f"axes: expected pipe and data, found {self.axes}")
        if len(self.dims) != len(self.axes) or any(dim < 1 for dim in self.dims):
            raise ValueError(f"dims: expected {len(self.axes)} numbers of at least 1, found {self.dims}")
        return self


class ModelTopo(_Section):
    """`model_topo`: how the model is spread."""

    process_topology: ProcessTopology = ProcessTopology()
    # Layers per stage (embedding + blocks + head); split evenly where absent.
    parts: list[int] | None = None

    @property
    def stages(self) -> int:
        return self._size("pipe")

    @property
    def replicas(self) -> int:
        return self._size("data")

    @property
    def processes(self) -> int:
        return prod(self.process_topology.dims)

    def _size(self, axis: Literal["pipe", "data"]) -> int:
        return self.process_topology.dims[self.process_topology.axes.index(axis)]

    @model_validator(mode="after")
    def _check(self) -> ModelTopo:
        if self.parts is None:
            return self
        if len(self.parts) != self.stages:
            raise ValueError(f"parts: expected one entry for each of {self.stages} stages, found {self.parts}")
        if any(part < 1 for part in self.parts):
            raise ValueError(f"parts: expected at least one layer a stage, found {self.parts}")
        return self


class TrainConfig(BaseModel):
    """A whole run. Keys that are not listed here are DeepSpeed's."""

    model_config = ConfigDict(extra="allow")

    # Folder of the model to start from, in either layout.
    model_path: str
    # JSON file of records, or a list of them.
    data_path: str | Annotated[list[str], Field(min_length=1)]
    # Folder for the run: config.yml, metrics.jsonl, checkpoints.
    save_path: str
    # Start from random weights of model_path's architecture instead of its weights.
    from_scratch: bool = False

    # Samples in one forward pass of one replica.
    train_micro_batch_size_per_gpu: int = Field(default=1, ge=1)
    # Samples in one optimizer step, over all replicas.
    train_batch_size: int = Field(ge=1)
    # Passes over the data; n_epochs is the same key.
    n_epoches: int = Field(default=1, ge=1)
    # Longer samples are cut, counted and reported.
    max_seq_len: int = Field(default=2048, ge=2)
    # Leave out the samples that do not fill an epoch's last batch.
    dataloader_drop_last: bool = False
    # chat_template or plain; the tokenizer's chat template when it ships one, where absent.
    prompt_format: PromptFormat | None = None
    # Of the data order, of fresh weights and of dropout.
    seed: int = Field(default=42, ge=0)

    optimizer: Optimizer = Optimizer()
    # A constant learning rate where absent.
    scheduler: Scheduler | None = None
    # The largest norm of the whole gradient; 0 turns clipping off.
    gradient_clipping: float = Field(default=1.0, ge=0)
    aux_max_z_loss: ZLoss = ZLoss()

    bf16: HalfPrecision = HalfPrecision()
    fp16: HalfPrecision = HalfPrecision()
    zero_optimization: Zero = Zero()
    # DeepSpeed's consent to optimizers it did not test with ZeRO; given for all that Pipetune offers.
    zero_allow_untested_optimizer: bool = True
    # Under offload, take DeepSpeed's own CPU optimizers, faster than torch's once they are compiled.
    zero_force_ds_cpu_optimizer: bool = True

    model_topo: ModelTopo = ModelTopo()
    # Recompute activations in the backward pass: less memory for a third more arithmetic.
    use_grad_ckpt: bool = False
    # Flash attention on GPUs that have it (not V100).
    use_flash_attn: bool = False

    # A line of metrics is printed every so many steps where no progress bar can be shown.
    steps_per_print: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("bf16.enabled: expected at most one of bf16 and fp16")
        if self.zero_optimization.stage > 1:
            raise ValueError(
                f"zero_optimization.stage: {self.zero_optimization.stage} cannot be combined with a pipeline; "
                "expected 0 or 1"
            )
        unit = self.train_micro_batch_size_per_gpu * self.model_topo.replicas
        if self.train_batch_size % unit:
            raise ValueError(
                f"train_batch_size: {self.train_batch_size} is not a multiple of {unit} "
                f"(train_micro_batch_size_per_gpu {self.train_micro_batch_size_per_gpu} x "
                f"{self.model_topo.replicas} replicas)"
            )
        steps = (self.model_extra or {}).get("gradient_accumulation_steps", self.train_batch_size // unit)
        if steps != self.train_batch_size // unit:
            raise ValueError(
                f"gradient_accumulation_steps: {steps} contradicts train_batch_size {self.train_batch_size}; "
                f"expected {self.train_batch_size // unit}, or leave it out"
            )
        return self

    @property
    def data_paths(self) -> list[str]:
        return [self.data_path] if isinstance(self.data_path, str) else self.data_path

    def parts_for(self, n_layers: int) -> list[int]:
        """Layers per stage for a model of `n_layers`, checked.

        Raises:
            ConfigError: `parts` does not sum to `n_layers`, or there are more stages than layers.
        """
        stages, parts = self.model_topo.stages, self.model_topo.parts
        if stages > n_layers:
            raise ConfigError(f"model_topo.process_topology.dims: {stages} stages for a model of {n_layers} layers")
        if parts is None:
            return [n_layers // stages + (stage < n_layers % stages) for stage in range(stages)]
        if sum(parts) != n_layers:
            raise ConfigError(
                f"model_topo.parts: {parts} sums to {sum(parts)}, but the model has {n_layers} layers "
                f"({n_layers - 2} blocks + embedding + head)"
            )
        return parts

    def dump(self) -> dict[str, Any]:
        """The resolved config as plain values, ready for YAML."""
        return self.model_dump(mode="json", exclude_none=True)


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read a YAML file, apply `key.sub=value` overrides and check the result.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown or has a wrong value.
    """
    raw = _read_yaml(Path(path))
    for word in overrides or []:
        _override(raw, word)
    _refuse_unknown(raw, str(path))
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from None


class _Loader(yaml.SafeLoader):
    """YAML with 1e-5 as a number (YAML 1.1 wants 1.0e-5) and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a plain value", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = _parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {place}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(raw).__name__}")
    for alias, name in ALIASES.items():
        if alias in raw:
            if name in raw:
                raise ConfigError(f"{path}: {alias} and {name} are one key; expected only one of them")
            raw[name] = raw.pop(alias)
    return raw


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only


def _override(raw: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"command line: {word!r}: expected key.sub=value")
    key = ALIASES.get(key, key)
    *parents, last = key.split(".")
    section = raw
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"command line: {key}: {parent} is a value, not a section")
    try:
        section[last] = _parse_yaml(text)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"command line: {key}: {text!r} is not a YAML value") from None


def _refuse_unknown(raw: dict[str, Any], where: str) -> None:
    own = set(TrainConfig.model_fields)
    for key in raw:
        if key not in own and key not in DEEPSPEED_KEYS:
            near = difflib.get_close_matches(str(key), [*own, *DEEPSPEED_KEYS], n=1, cutoff=0.0)
            raise ConfigError(f"{where}: unknown key {key}; did you mean {near[0]}?")


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    steps = [str(step) for step in first["loc"] if str(step) not in ("str", "list[str]")]
    place = ".".join(steps)
    if first["type"] == "missing":
        return f"{place}: missing"
    if first["type"] == "extra_forbidden":
        return f"unknown key {place}{_nearest_in_section(steps)}"
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        return f"{place}.{reason}" if place else reason
    message = first["msg"].replace("Input should be a valid", "expected a").replace("Input should be", "expected")
    return f"{place}: {message}, found {first['input']!r}"


def _nearest_in_section(steps: list[str]) -> str:
    section: Any = TrainConfig
    for step in steps[:-1]:
        annotation = section.model_fields[step].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        section = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    near = difflib.get_close_matches(steps[-1], section.model_fields, n=1, cutoff=0.0)
    return f"; did you mean {'.'.join([*steps[:-1], *near])}?"

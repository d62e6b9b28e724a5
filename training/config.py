"""The keys of a run's config: each one's meaning, its default, its check.

`training.config_file` reads them from YAML; the resolved config is saved with the run.
"""

from __future__ import annotations

import re
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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


class RouterLoss(_Section):
    """`aux_router_loss`: the load-balancing loss of mixture-of-experts models."""

    # As transformers would with the model's config.json where absent: its router_aux_loss_coef if it says
    # output_router_logits, else none.
    weight: float | None = Field(default=None, ge=0)


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
    aux_router_loss: RouterLoss = RouterLoss()

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

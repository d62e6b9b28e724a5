"""A run's config: the keys of `run_keys`, those of how a run is spread and computed, and what keys say together.

`training.config.yaml_file` reads them from YAML; the resolved config is saved with the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from inspect import get_annotations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, PositiveInt, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from data.settings import Pixels
from training.config.changes import CHANGES, MayChange
from training.config.contradictions import contradictions
from training.config.deepspeed_keys import OVERRIDES, take_up
from training.config.model_topo import ModelTopo
from training.config.option_keys import OptionKeys
from training.config.run_keys import RunKeys, TrackerSwitch
from training.config.section import expected
from training.errors import ConfigError
from training.schedule.instructions import Schedule
from training.topology import Topology

if TYPE_CHECKING:  # which need torch
    from models.spec import ModelSpec
    from training.objective import Objective

# Keys of zero_optimization by which DeepSpeed itself sums the replicas' gradients.
SUM_KEYS = {"reduce_scatter", "reduce_bucket_size", "contiguous_gradients", "use_multi_rank_bucket_allreduce"}

Automatic = Annotated[bool | Literal["auto"], expected("true, false or auto")]
EveryNth = Annotated[dict[Literal["every"], PositiveInt], Field(min_length=1)]

ALIASES = {"n_epochs": "n_epoches", "parts": "model_topo.parts"}  # other spellings of our own keys


class TrainConfig(RunKeys):
    """A whole run without options; `options.RunConfig` has their keys as well.

    Attributes:
        options: those whose keys the class has.
        rules: how each key, or all of a section, may change between two starts.
    """

    options: ClassVar[tuple[OptionKeys[Any], ...]] = ()
    rules: ClassVar[Mapping[str, MayChange]] = CHANGES

    model_topo: ModelTopo = ModelTopo()
    schedule: Schedule = "1f1b"
    """The order of a stage's work: `1f1b`, one forward, one backward; or `dualpipev`, which gives each stage two
    chunks of the layers, so that stages wait less where a step has few micro-batches
    (docs/parallelism.md#dims-and-parts)."""

    use_grad_ckpt: Annotated[bool | Literal["auto"] | EveryNth, expected("true, false, auto or {every: n}")] = False
    """Recompute activations in the backward pass: less memory for about a third more arithmetic. `true`: in all
    blocks, those of a trained tower of images too; `{every: 2}`: in every second one of the language model; `auto`:
    in as many as the GPU's memory needs (on a CPU none); the log shows how many in each stage."""

    offload_activations: bool = False
    """Keep what the backward pass needs in host memory: with `use_grad_ckpt` the inputs of blocks, else their
    activations. They come back one block ahead. It saves memory on a GPU only."""

    offload_gradients: bool = False
    """With `offload_optimizer` in a pipeline: sum gradients in host memory too, where they take none beside the
    optimizer's; on a GPU a parameter then takes 2 bytes in bf16 instead of 6. Each micro-batch moves the sums over the
    bus and back while it computes, so fewer and larger ones are faster. The numbers are the same to the last bit."""

    use_flash_attn: Automatic = "auto"
    """The attention kernel. `auto` times each exact one of the GPU on one block and rows like the run's, which
    takes a second or two, takes the fastest, logs the times and keeps the choice in `kernels.json` beside the run.
    `true`: flash attention without a trial: the flash-attn package where it is installed, else torch's own kernel
    for packed rows (torch 2.11 and newer), or its flex attention where a family has biases or caps. `false`: the
    family's usual kernel, which every device has; CPUs, fp32 runs and GPUs before Ampere (V100, T4) use it anyway,
    and the log says why."""

    compile: Automatic = "auto"
    """Graph (`true`) or eager (`false`): compile the blocks with torch.compile, once, for rows of all lengths. The
    first steps take up to some minutes more. `auto` compiles on GPUs from Ampere on where a trial block compiles, but
    not with experts or ZeRO stage 3; `true` compiles on any device, and ZeRO stage 3 refuses it."""

    deterministic: bool = False
    """Use only kernels that sum in the same order each time. Without it no two runs on GPUs are equal to the last
    bit; with it a resumed run is. Attention's backward pass gets slower, and an operation without such a kernel is
    refused by its name. Runs on CPUs are always equal."""

    tf32: bool = False
    """Compute the products of an fp32 run on tensor cores (GPUs from Ampere on), with 10 bits of each factor; the
    log of an fp32 run says how much faster they are. Angles of positions stay exact."""

    steps_per_print: int = Field(default=1, ge=1)
    """Print a line of metrics every N steps, where the output is not a terminal and so has no progress bar."""

    _left_out: list[str] = []  # keys of DeepSpeed's that are off
    _read_otherwise: list[str] = []  # a line for each value of its file that means something else here

    @classmethod
    def __pydantic_init_subclass__(cls, **named: Any) -> None:
        """Put the keys of each option where they belong, and attach their rules.

        pydantic lists inherited keys class by class, and takes all of the first base as it has them, even those that
        another base declares anew.
        """
        super().__pydantic_init_subclass__(**named)
        if not cls.options:
            return
        order, rules = list(TrainConfig.model_fields), dict(CHANGES)
        for option in cls.options:
            if own := [name for name in option.keys.model_fields if name not in order]:
                place = order.index(option.before)
                order[place:place] = own
            rules |= option.rules
        cls.rules = rules

        fields = dict(cls.model_fields)
        for kind in (kind for kind in reversed(cls.__mro__) if issubclass(kind, TrainConfig)):
            fields |= {name: kind.model_fields[name] for name in get_annotations(kind) if name in kind.model_fields}
        cls.__pydantic_fields__ = {name: fields[name] for name in dict.fromkeys([*order, *fields])}
        cls.model_rebuild(force=True)

    @field_validator("resume", mode="before")
    @classmethod
    def _switch_resume(cls, resume: Any) -> Any:
        """Read `resume: true` as `auto`, `false` as `none`."""
        return {True: "auto", False: "none"}[resume] if isinstance(resume, bool) else resume

    @model_validator(mode="wrap")
    @classmethod
    def _take_up(cls, raw: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(raw, dict):
            return handler(raw)
        keys, left_out, lines = take_up(raw, (info.context or {}).get(OVERRIDES, ()))
        config = handler(keys)
        config._left_out, config._read_otherwise = left_out, lines
        return config

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        given = "trackers" in self.model_fields_set
        sections = {name: section for name, section in self if isinstance(section, TrackerSwitch)}
        if unknown := set(self.trackers) - sections.keys():
            raise ValueError(f"trackers: expected some of {', '.join(sections)}, found {unknown.pop()}")
        for name, section in sections.items():
            if section.enabled is False and name in self.trackers and given:
                raise ValueError(f"{name}.enabled: false, but trackers names {name}; expected only one of them")
            if section.enabled is not None:
                self.trackers = [each for each in self.trackers if each != name] + [name] * section.enabled
            setattr(self, name, section.model_copy(update={"enabled": name in self.trackers}))
        for contradiction in self.contradictions():
            raise ValueError(contradiction)
        if len(self.objective_keys) > 1:
            raise ValueError(f"{' and '.join(self.objective_keys)}: each has a loss of its own; expected one of them")
        return self

    def contradictions(self) -> Iterator[str]:
        """Yield a line for each two keys that contradict each other, the plainest first."""
        yield from contradictions(self)

    @property
    def windows_key(self) -> str:
        """Name the key by which records come in windows, so that not all are read before the first step, if any."""
        return ""

    @property
    def is_planned(self) -> bool:
        """Whether an option resolves what is `auto`; else layers are divided evenly, and kernels are the usual ones."""
        return False

    @property
    def micro_batch_size(self) -> int:
        """Rows in one forward pass of one replica; 1 where `auto` has not chosen yet."""
        return 1 if self.train_micro_batch_size_per_gpu == "auto" else self.train_micro_batch_size_per_gpu

    @property
    def v_schedule(self) -> bool:
        """Say whether each stage holds two chunks of the layers."""
        return self.schedule == "dualpipev" and self.model_topo.stages > 1

    @property
    def weights_on_host(self) -> bool:
        """Say whether weights and optimizer lie in host memory, without ZeRO; the trainer then scales losses itself."""
        return False

    def compiles(self, ampere: bool, experts: bool) -> bool:
        """Say whether blocks are compiled on such a device."""
        return self.compile if self.compile != "auto" else ampere and self.compile_obstacle(experts) is None

    def compile_obstacle(self, experts: bool) -> str | None:
        """Say why `compile: auto` compiles no blocks on any GPU, if so."""
        if experts:
            return "how many tokens an expert gets changes with every micro-batch"
        return "ZeRO stage 3 gathers weights inside of them" if self.zero_optimization.stage == 3 else None

    def has_flash(self, ampere: bool) -> bool:
        """Say whether attention keeps no scores on such a device."""
        return bool(self.use_flash_attn) and ampere and (self.bf16.enabled or self.fp16.enabled)

    @property
    def chunks(self) -> int:
        """Count the chunks that the layers are divided into."""
        return self.model_topo.stages * (2 if self.v_schedule else 1)

    @property
    def objective(self) -> Objective:
        """What is trained, which keeps nothing but this config; the class of an option's keys may say another one."""
        from training.fine_tuning import FineTuning  # which needs torch

        return FineTuning(self)

    @property
    def pixels(self) -> Pixels:
        """Between how many pixels images are resized to."""
        return Pixels()

    @property
    def adapts_beside(self) -> bool:
        """Whether `lora` reaches parts beside the decoder, whose names are known once the records are."""
        return False

    @property
    def objective_keys(self) -> list[str]:
        """Name the given keys that ask for another objective than fine-tuning."""
        keys = [option.objective_key for option in self.options]
        return [key for key in keys if key and getattr(self, key)]

    @property
    def sample_limit(self) -> int:
        """Most tokens of a sample, which may be several documents."""
        return self.max_seq_len * self.objective.documents

    @property
    def least_micro_batches(self) -> int:
        """Count the micro-batches that the schedule needs; 0 where any will do."""
        return self.chunks if self.v_schedule else 0

    @property
    def sums_while_computing(self) -> bool:
        """Say whether replicas sum gradients during the backward pass: unless DeepSpeed has to do it."""
        zero = self.zero_optimization
        by_deepspeed = zero.offloads or self.data_types or SUM_KEYS & set(zero.model_extra or {})
        return self.model_topo.replicas > 1 and zero.stage == 1 and not by_deepspeed

    def check_entry_point(self, in_stages: bool) -> None:
        """Refuse a missing `lr`, and what only the other entry point can do.

        Raises:
            ConfigError: no `lr`; in a pipeline ZeRO stage 2 or 3; without one several stages or a model axis.
        """
        if "lr" not in self.optimizer.params:  # torch's default, 1e-3, spoils a trained model without a word
            raise ConfigError("optimizer.params.lr: missing; expected a learning rate, such as 1.0e-5 for a 7B model")
        if in_stages and self.zero_optimization.stage > 1:
            raise ConfigError(
                f"zero_optimization.stage: {self.zero_optimization.stage} cannot be combined with a pipeline; "
                "expected 0 or 1, or train_ds_zero.py"
            )
        if not in_stages and self.model_topo.stages > 1:
            raise ConfigError(
                f"model_topo.process_topology.dims: {self.model_topo.process_topology.dims} asks for "
                f"{self.model_topo.stages} stages; ZeRO has no pipeline: expected 1 for pipe, or no model_topo"
            )
        if not in_stages and self.offload_gradients:
            raise ConfigError("offload_gradients: a pipeline's (train_ds.py); ZeRO stage 2 and 3 do so by themselves")
        if not in_stages and self.model_topo.tensor > 1:
            raise ConfigError(
                f"model_topo.process_topology.dims: {self.model_topo.tensor} processes to a layer are a pipeline's; "
                "expected no model axis, or train_ds.py"
            )

    def check_model(self, spec: ModelSpec) -> None:
        """Refuse, by a ConfigError, a model that cannot be trained as an option's keys say."""

    def train_beside(self, spec: ModelSpec) -> ModelSpec:
        """Say in a model's spec what is trained beside its decoder, where an option's keys know of such parts."""
        return spec

    def check_packages(self) -> None:
        """Refuse, by a ConfigError, a tracker whose package is not installed."""
        for name in self.trackers:
            found = find_spec(name)
            if found is None or found.origin is None:  # a folder of that name, as trackers leave them
                raise ConfigError(
                    f"trackers: the package {name} is not installed; expected pip install {name}, or no {name} there"
                )

    def recomputed(self, n_blocks: int, tower: bool = False) -> frozenset[int]:
        """List the blocks that recompute, with `auto` all that may have to; 0 stands for those of a tower."""
        if not self.use_grad_ckpt:
            return frozenset()
        if isinstance(self.use_grad_ckpt, dict):
            every = self.use_grad_ckpt["every"]
            return frozenset(range(every, n_blocks + 1, every))
        return frozenset(range(0 if tower else 1, n_blocks + 1))

    def parts_for(self, n_layers: int) -> list[int] | None:
        """Return the layers per chunk, checked; None where `auto` chooses.

        Raises:
            ConfigError: `parts` does not sum to `n_layers`, or there are more stages than layers.
        """
        chunks, parts = self.chunks, self.model_topo.parts
        if chunks > n_layers:
            of_two = " of two chunks (schedule: dualpipev)" if self.v_schedule else ""
            raise ConfigError(
                f"model_topo.process_topology.dims: {self.model_topo.stages} stages{of_two} for a model of "
                f"{n_layers} layers"
            )
        if parts is not None and sum(parts) != n_layers:
            raise ConfigError(
                f"model_topo.parts: {parts} sums to {sum(parts)}, but the model has {n_layers} layers "
                f"({n_layers - 2} blocks + embedding + head)"
            )
        return [n_layers] if chunks == 1 else parts

    def topology(self, parts: list[int]) -> Topology:
        """Return the topology with these layers per stage or chunk; none under plain ZeRO."""
        topo = self.model_topo
        # What is 1 is left out: a checkpoint's record has only what is set, and earlier versions know no more.
        wide = {name: size for name in ("tensor", "sequence") if (size := getattr(topo, name)) > 1}
        wide |= {"spread": True} if topo.experts == "spread" else {}
        zero = self.zero_optimization.stage
        return Topology(stages=topo.stages, replicas=topo.replicas, zero_stage=zero, parts=parts, **wide)

    def with_parts(self, parts: list[int]) -> Self:
        """Copy the config with these layers per stage; `[]` is `parts: auto`."""
        return self.model_copy(update={"model_topo": self.model_topo.model_copy(update={"parts": parts or None})})

    def dump(self) -> dict[str, Any]:
        """Return the resolved config as plain values, ready for YAML."""
        return self.model_dump(mode="json", exclude_none=True)

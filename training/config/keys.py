"""Keys of a run's config: meaning, default and check of each.

`training.config.yaml_file` reads them from YAML; the resolved config is saved with the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from inspect import get_annotations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, PositiveInt, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from data.chat.prompts import PromptFormat
from data.settings import Fallback, Mask, OnBadRecord, Packing, TemplateArguments, Truncate
from training.config.changes import CHANGES, MayChange
from training.config.contradictions import contradictions
from training.config.deepspeed_keys import OVERRIDES, take_up
from training.config.model_topo import ModelTopo
from training.config.objective import LoraSection, RouterLoss, ZLoss
from training.config.optimization import Optimizer, Scheduler, Zero
from training.config.precision import BF16, FP8, FP16, DataTypes, Precision
from training.config.section import DataPath, NewPathText, PathText, Section, expected
from training.config.services import Ports, TrackerSwitch
from training.errors import ConfigError
from training.schedule.instructions import WEIGHT_STREAMING, Schedule
from training.topology import Topology

if TYPE_CHECKING:  # which need torch
    from training.objective import Objective
    from training.option import Option

# Keys of zero_optimization by which DeepSpeed itself sums the replicas' gradients.
SUM_KEYS = {"reduce_scatter", "reduce_bucket_size", "contiguous_gradients", "use_multi_rank_bucket_allreduce"}
LONGEST = 2**24  # tokens: of a sample or a row
YEAR = 366 * 24 * 60  # minutes

Automatic = Annotated[bool | Literal["auto"], expected("true, false or auto")]
EveryNth = Annotated[dict[Literal["every"], PositiveInt], Field(min_length=1)]

ALIASES = {"n_epochs": "n_epoches", "parts": "model_topo.parts"}  # other spellings of our own keys


class TrainConfig(Section):
    """A whole run without options; `options.RunConfig` has their keys as well.

    Attributes:
        options: those whose keys the class has.
        rules: how each key, or all of a section, may change between two starts.
    """

    options: ClassVar[tuple[Option[Any], ...]] = ()
    rules: ClassVar[Mapping[str, MayChange]] = CHANGES

    model_path: PathText
    """The folder of the model to start from, in either layout; the `save_path` of a run stands for its newest
    checkpoint, and a name such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION` for a model on the HuggingFace hub
    (docs/conversion.md#models-by-their-names-on-the-hub)."""

    data_path: Annotated[DataPath, Field(min_length=1)]
    """The records to train on: a file, a folder, a glob, a data set on the HuggingFace hub
    (docs/data.md#data-sets-on-the-hub), or a list of them; an entry may be an object with the keys of
    docs/configuration.md#entries-of-data_path."""

    save_path: NewPathText
    """The folder of the run: config.yml, metrics.jsonl, checkpoints. It is made where it does not exist."""

    from_scratch: bool = False
    """Start from random weights of `model_path`'s architecture instead of its weights; config.json and the tokenizer
    are enough then."""

    lora: LoraSection | None = None
    freeze: list[re.Pattern[str]] = []
    """Regular expressions; weights whose names in transformers' model match one are not trained, such as
    `[embed_tokens, 'layers\\.[0-7]\\.']`."""

    train_micro_batch_size_per_gpu: Annotated[PositiveInt | Literal["auto"], expected("a number of rows, or auto")] = 1
    """Rows in one forward pass of one replica. A row is a sample, or several where they are packed. `auto` takes the
    number with which the planner finds a step fastest, within the memory; a resumed run keeps it."""

    train_batch_size: int = Field(ge=1)
    """Samples in one optimizer step, over all replicas; a multiple of micro-batch x replicas, of which those that share
    rows (`model_topo.sequence`) count as one."""

    n_epoches: int = Field(default=1, ge=1)
    """Passes over the data; `n_epochs` is the same key."""

    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps; overrides `n_epoches`."""

    max_seq_len: int = Field(default=2048, ge=2, le=LONGEST)
    """Tokens of the longest sample. Longer dialogues are cut, at the end of a turn where possible, and longer texts
    are split; both are counted. Samples without trained-on tokens are dropped and counted too."""

    truncate: Truncate = "turns"
    """How a dialogue longer than `max_seq_len` is cut: drop its last turns (`turns`) or its oldest (`oldest`, which
    keeps the last answer and the system message), or refuse it (`refuse`)."""

    packing: Packing = "batch"
    """Pack several samples into one row. `batch` packs the samples of each global batch into as few rows as it can,
    which changes only the time; `dataset` packs the whole shuffled epoch, and `train_batch_size` then counts rows;
    `false` gives each sample a row of its own."""

    pack_len: int | None = Field(default=None, ge=8, le=LONGEST)
    """Tokens in a packed row. Without the key it is chosen: for `batch` a length that gives each stage at least four
    micro-batches, with a router loss that of the longest sample; for `dataset` `max_seq_len`."""

    dataloader_drop_last: bool = False
    """Drop the samples that do not fill an epoch's last batch; otherwise that batch is smaller."""

    prompt_format: PromptFormat | None = None
    """`chat_template`, `plain`, `gdgpt` (gdGPT's prompts), or a Jinja file with a chat template of your own
    (docs/chat-templates.md). Without the key the tokenizer's chat template where it has one, else `plain`."""

    template_args: TemplateArguments = {}
    """Extra variables for the chat template, such as `{enable_thinking: true}`."""

    template_fallback: Fallback | None = None
    """What to do with what the chat template does not support: `rewrite` says it in another way, `refuse` refuses
    the record. Without the key some things are rewritten and others refused (docs/chat-templates.md)."""

    mask: Mask = "assistant"
    """Which tokens are trained on: all of the assistant's messages (`assistant`), those after the last question
    (`last_turn`), or all tokens (`all`)."""

    on_bad_record: OnBadRecord = "stop"
    """`stop` refuses to start and shows up to 20 bad records; `skip` leaves them out and counts them."""

    cache_dir: str | None = None
    """The folder for tokenized records; it can be deleted at any time. Without the key the one that the environment
    variable `PIPETUNE_CACHE` names, else `~/.cache/pipetune`."""

    seed: int = Field(default=42, ge=0)
    """The seed of the data order, fresh weights and dropout."""

    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler | None = None
    """The learning rate over the run; constant without the key."""

    gradient_clipping: float = Field(default=1.0, ge=0)
    """The largest norm of the gradient of all stages; 0 turns clipping off."""

    aux_max_z_loss: ZLoss = ZLoss()
    aux_router_loss: RouterLoss = RouterLoss()

    bf16: BF16 = BF16()
    fp16: FP16 = FP16()
    fp8: FP8 = FP8()
    zero_optimization: Zero = Zero()
    deepspeed_config: PathText | None = None
    """A JSON file of DeepSpeed; its keys are read as if they stood here
    (docs/coming-from.md#a-json-file-of-deepspeed). A key in both must have the same value; the command line overrides
    both. config.yml gets the keys themselves."""

    zero_allow_untested_optimizer: bool = True
    """DeepSpeed's consent to optimizers that it did not test with ZeRO; given for all of Pipetune's."""

    zero_force_ds_cpu_optimizer: bool = True
    """With `offload_optimizer`: DeepSpeed's own CPU AdamW, Adam or Lion, compiled at first use (about a minute);
    `false` keeps the optimizer that `optimizer.type` names."""

    communication_data_type: Precision | None = None
    """DeepSpeed's own: the dtype in which gradients are sent, `fp32`, `bf16` or `fp16`."""

    data_types: DataTypes | None = None

    gradient_accumulation_steps: int | None = None
    """Computed; if given, it must agree with the batch sizes."""

    resume: PathText = "auto"
    """`auto` resumes from the newest whole checkpoint in `save_path`, if there is one; a folder resumes from that
    checkpoint; `none` starts anew, in a `save_path` without checkpoints. What may change between two starts:
    docs/resuming.md."""

    save_interval: int | None = Field(default=None, ge=1)
    """Save a checkpoint every N steps, and always one at the end."""

    save_minutes: float | None = Field(default=None, gt=0)
    """Save a checkpoint every N minutes."""

    save_async: bool = False
    """Write checkpoints in the background: a save takes as long as a copy to host memory, which needs room there
    for what a process saves (docs/cluster.md#starting-and-saving-with-many-processes). The next save, an evaluation
    and the end of the run wait for it."""

    storage: Literal["shared", "local"] = "shared"
    """`shared`: all machines see the same `save_path`; `local`: each has its own disk there
    (docs/resuming.md#each-machine-its-own-disk)."""

    keep_last: int = Field(default=2, ge=1)
    """How many checkpoints to keep, besides the best one by evaluation."""

    on_save_error: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint cannot be written, such as on a full disk: `continue` with a warning, or `stop`.
    Earlier checkpoints stay whole."""

    timeout_minutes: float = Field(default=30, gt=0, le=YEAR)
    """End the run when nothing has moved for this long, and name the rank that blocks the others; a step, an
    evaluation's batch and a save must take less, the export at the end need not."""

    max_restarts: int = Field(default=0, ge=0)
    """Restart the run up to N times after a fault, from the newest checkpoint, also on fewer machines
    (docs/cluster.md#when-a-host-is-lost); needs `save_interval` or `save_minutes`, and `python train_ds.py` as the
    launcher."""

    max_bad_steps: int = Field(default=3, ge=1)
    """End the run after N steps in a row whose loss or gradient is NaN or infinite, and name the records that cause
    it; such a step changes no weight."""

    preemption_signals: list[Literal["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGPWR"]] = ["SIGUSR1"]
    """Signals that announce a preemption: the run saves after the current step and ends, and a job of Slurm is
    requeued. SIGUSR1, SIGUSR2, SIGHUP, SIGQUIT, SIGXCPU, SIGPWR."""

    ports: Ports = Ports()
    export_hf: bool = False
    """Write the trained model as a HuggingFace folder at the end, to `save_path/hf`, with a model card."""

    eval_data_path: DataPath = []
    """Records to evaluate on, as in `data_path`; no evaluation without this key and `eval_share`."""

    eval_share: float = Field(default=0.0, ge=0, lt=1)
    """Or the share of the samples of `data_path` to evaluate on instead of training on it, drawn by the seed; equal
    samples stay on one side."""

    eval_interval: int | None = Field(default=None, ge=1)
    """Evaluate every N steps, and after the last one; needs `eval_data_path` or `eval_share`. Without the key at
    the end of each epoch, and of a streamed run."""

    eval_at_start: bool = False
    """Evaluate before the first step too; needs `eval_data_path` or `eval_share`."""

    trackers: Sequence[str] = ["tensorboard"]
    """Where the numbers of metrics.jsonl are drawn as well: names of sections that are trackers."""

    tensorboard: TrackerSwitch = TrackerSwitch()

    model_topo: ModelTopo = ModelTopo()
    rebalance: bool = False
    """With `parts: auto`: restart all processes in better parts after the next checkpoint, where the first steps
    show that they fit and make a step at least 3 % faster (docs/parallelism.md#plan-before-you-train); needs
    `save_interval` or `save_minutes`."""

    schedule: Schedule = "1f1b"
    """The order of a stage's work: `1f1b`, one forward, one backward; `dualpipev`, which gives each stage two
    chunks of the layers, so that stages wait less where a step has few micro-batches
    (docs/parallelism.md#dims-and-parts); or `weight_streaming`, for models larger than the GPUs: weights and optimizer
    lie in host memory, and the GPUs of a host take turns at all layers (docs/weight-streaming.md)."""

    use_grad_ckpt: Annotated[bool | Literal["auto"] | EveryNth, expected("true, false, auto or {every: n}")] = False
    """Recompute activations in the backward pass: less memory for about a third more arithmetic. `true`: in all
    blocks; `{every: 2}`: in every second one; `auto`: in as many as the planner finds the GPU's memory to need (on
    a CPU none); the log shows how many in each stage."""

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
        if self.schedule == WEIGHT_STREAMING:  # in place of ZeRO, each process updates layers of its own
            self.zero_optimization = self.zero_optimization.model_copy(update={"stage": 0})
        return self

    def contradictions(self) -> Iterator[str]:
        """Yield a line for each two keys that contradict each other, the plainest first."""
        yield from contradictions(self)

    @property
    def windows_key(self) -> str:
        """Name the key by which records come in windows, so that not all are read before the first step, if any."""
        return ""

    @property
    def micro_batch_size(self) -> int:
        """Rows in one forward pass of one replica; 1 where `auto` has not chosen yet."""
        return 1 if self.train_micro_batch_size_per_gpu == "auto" else self.train_micro_batch_size_per_gpu

    @property
    def v_schedule(self) -> bool:
        """Say whether each stage holds two chunks of the layers."""
        return self.schedule == "dualpipev" and self.model_topo.stages > 1

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
    def objective_keys(self) -> list[str]:
        """Name the keys that ask for another objective than fine-tuning: each option's class adds its own."""
        return []

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
        if not in_stages and self.schedule == WEIGHT_STREAMING:
            raise ConfigError("schedule: weight_streaming is a pipeline's; expected train_ds.py, or no schedule")
        if not in_stages and self.offload_gradients:
            raise ConfigError("offload_gradients: a pipeline's (train_ds.py); ZeRO stage 2 and 3 do so by themselves")
        if not in_stages and self.model_topo.tensor > 1:
            raise ConfigError(
                f"model_topo.process_topology.dims: {self.model_topo.tensor} processes to a layer are a pipeline's; "
                "expected no model axis, or train_ds.py"
            )

    def check_packages(self) -> None:
        """Refuse a tracker whose package is not installed.

        Raises:
            ConfigError: one is not.
        """
        for name in self.trackers:
            found = find_spec(name)
            if found is None or found.origin is None:  # a folder of that name, as trackers leave them
                raise ConfigError(
                    f"trackers: the package {name} is not installed; expected pip install {name}, or no {name} there"
                )

    def recomputed(self, n_blocks: int) -> frozenset[int]:
        """List the blocks that recompute; with `auto` all that may have to."""
        if not self.use_grad_ckpt:
            return frozenset()
        step = self.use_grad_ckpt["every"] if isinstance(self.use_grad_ckpt, dict) else 1
        return frozenset(range(step, n_blocks + 1, step))

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

    def with_parts(self, parts: list[int]) -> TrainConfig:
        """Copy the config with these layers per stage; `[]` is `parts: auto`."""
        topo = self.model_topo.model_copy(update={"parts": parts or None})
        return self.model_copy(update={"model_topo": topo, "rebalance": False})

    def dump(self) -> dict[str, Any]:
        """Return the resolved config as plain values, ready for YAML."""
        return self.model_dump(mode="json", exclude_none=True)

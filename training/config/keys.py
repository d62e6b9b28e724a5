"""The keys of a run's config: each one's meaning, its default, its check.

`training.config.yaml_file` reads them from YAML; the resolved config is saved with the run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from data.chat.prompts import Fallback, Mask, PromptFormat, TemplateArguments, Truncate
from data.packing import Packing
from data.records.reading import OnBadRecord
from training.config.contradictions import contradictions
from training.config.sections import (
    BF16,
    FP8,
    FP16,
    DataPath,
    EveryNth,
    ModelTopo,
    Optimizer,
    Ports,
    RouterLoss,
    Scheduler,
    Section,
    TensorBoard,
    WandB,
    Zero,
    ZLoss,
)
from training.errors import ConfigError
from training.schedule.instructions import Schedule

# DeepSpeed's keys that would be without effect in a pipeline, or change what is trained in ways that nobody has tested.
NOT_PASSED_ON = frozenset(
    "activation_checkpointing aio amp checkpoint comms_logger csv_monitor disable_allgather dump_state flops_profiler "
    "gradient_predivide_factor memory_breakdown pipeline prescale_gradients sparse_gradients torch_autocast "
    "wall_clock_breakdown".split()
)
# What says how DeepSpeed sums the replicas' gradients.
DEEPSPEEDS_SUMS = {"reduce_scatter", "reduce_bucket_size", "contiguous_gradients", "use_multi_rank_bucket_allreduce"}
LONGEST = 2**24  # tokens: of a sample or a row
YEAR = 366 * 24 * 60  # minutes

ALIASES = {"n_epochs": "n_epoches"}  # other spellings of our own keys


class TrainConfig(Section):
    """A whole run."""

    # Folder of the model to start from, in either layout.
    model_path: str
    # Files of records: paths, globs or folders, or sources with a share of their own (data/records/sources.py).
    data_path: Annotated[DataPath, Field(min_length=1)]
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
    # Steps of the run, however many epochs that is; n_epoches does not count then.
    max_steps: int | None = Field(default=None, ge=1)
    # Tokenize while training, with so many GB of samples on the disk at any time: for data that are larger than that.
    stream_gb: float | None = Field(default=None, gt=0)
    # Longer samples are cut, counted and reported.
    max_seq_len: int = Field(default=2048, ge=2, le=LONGEST)
    # How a dialogue is cut: behind its last turns that fit (turns), by its oldest turns (oldest), or not (refuse).
    truncate: Truncate = "turns"
    # Put several samples into one row: batch packs those of each global batch, which changes nothing but the time;
    # dataset packs the whole epoch, and train_batch_size then counts rows; false pads each sample to its neighbours.
    packing: Packing = "batch"
    # Tokens in a packed row; for batch a length that keeps the pipeline busy, for dataset max_seq_len, where absent.
    pack_len: int | None = Field(default=None, ge=8, le=LONGEST)
    # Leave out the samples that do not fill an epoch's last batch.
    dataloader_drop_last: bool = False
    # chat_template, plain, or a Jinja file; the tokenizer's chat template when it ships one, where absent.
    prompt_format: PromptFormat | None = None
    # What a chat template gets beside the messages, such as enable_thinking: true.
    template_args: TemplateArguments = {}
    # Say in another way what a chat template does not take, or refuse the record; see `data.chat.fallbacks`.
    template_fallback: Fallback | None = None
    # Which tokens bear loss: all of the assistant's messages, those after the last question (last_turn), or all.
    mask: Mask = "assistant"
    # Refuse to start because of records that something is wrong with, or leave them out and count them.
    on_bad_record: OnBadRecord = "stop"
    # Folder for tokenized records; the user's cache folder where absent.
    cache_dir: str | None = None
    # Of the data order, of fresh weights and of dropout.
    seed: int = Field(default=42, ge=0)

    optimizer: Optimizer = Optimizer()
    # A constant learning rate where absent.
    scheduler: Scheduler | None = None
    # The largest norm of the whole gradient; 0 turns clipping off.
    gradient_clipping: float = Field(default=1.0, ge=0)
    aux_max_z_loss: ZLoss = ZLoss()
    aux_router_loss: RouterLoss = RouterLoss()

    bf16: BF16 = BF16()
    fp16: FP16 = FP16()
    # In a bf16 run, the products of the blocks' linear layers in fp8: on GPUs from Ada and Hopper on, with torchao.
    fp8: FP8 = FP8()
    zero_optimization: Zero = Zero()
    # DeepSpeed's consent to optimizers it did not test with ZeRO; given for all that Pipetune offers.
    zero_allow_untested_optimizer: bool = True
    # Under offload, take DeepSpeed's own CPU optimizers, faster than torch's once they are compiled.
    zero_force_ds_cpu_optimizer: bool = True

    # DeepSpeed's own, passed on as they are (deepspeed.ai/docs/config-json).
    communication_data_type: str | None = None
    data_types: dict[str, Any] | None = None
    # Computed; where it is given it must agree with the batch sizes.
    gradient_accumulation_steps: int | None = None

    # Continue from the newest whole checkpoint in save_path (auto), from the one in this folder, or start anew (none);
    # dims, parts and the ZeRO stage may be others than it was saved with.
    resume: str = "auto"
    # Save every so many optimizer steps, and whenever so many minutes have passed; always at the end.
    save_interval: int | None = Field(default=None, ge=1)
    save_minutes: float | None = Field(default=None, gt=0)
    # Whether all hosts share save_path (shared), or each has its own disk there (local).
    storage: Literal["shared", "local"] = "shared"
    # How many checkpoints stay; the best one by evaluation stays besides.
    keep_last: int = Field(default=2, ge=1)
    # What a run does when a checkpoint cannot be written, such as on a full disk.
    on_save_error: Literal["continue", "stop"] = "continue"
    # End the run when nothing moved for so many minutes: a step, an evaluation's batch and a save must take less.
    timeout_minutes: float = Field(default=30, gt=0, le=YEAR)
    # Start the run so many times again after a fault, on the hosts that are left; where python train_ds.py started it.
    max_restarts: int = Field(default=0, ge=0)
    # End the run after so many steps in a row whose loss or gradient is not finite; such a step changes no weight.
    max_bad_steps: int = Field(default=3, ge=1)
    # Signals by which a cluster says that it takes the machines away: the run saves after the step under way and ends,
    # and a job of Slurm is requeued.
    preemption_signals: list[Literal["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGPWR"]] = ["SIGUSR1"]
    # On rank 0's host, to be open for the other hosts of the run.
    ports: Ports = Ports()
    # Write the trained model as a HuggingFace folder at the end, to save_path/hf.
    export_hf: bool = False

    # Records to measure the loss on, as in data_path.
    eval_data_path: DataPath = []
    # Or the share of data_path's samples that is measured on instead of trained on, drawn by the seed; 0: none.
    eval_share: float = Field(default=0.0, ge=0, lt=1)
    # Evaluate every so many optimizer steps; at the end of each epoch where absent, and of a streamed run.
    eval_interval: int | None = Field(default=None, ge=1)
    # Evaluate before the first step too.
    eval_at_start: bool = False

    # Curves of the metrics, besides metrics.jsonl.
    tensorboard: TensorBoard = TensorBoard()
    wandb: WandB = WandB()

    model_topo: ModelTopo = ModelTopo()
    # Go on in the parts that the first steps showed to be faster, from the next checkpoint on.
    rebalance: bool = False
    # In which order a stage works: one forward, one backward; or DualPipeV, where each stage holds two chunks of the
    # layers and waits less when a step has few micro-batches.
    schedule: Schedule = "1f1b"
    # Recompute activations in the backward pass, less memory for a third more arithmetic: of all blocks (true), of
    # every n-th one ({every: n}), or of as many as the device's memory asks for (auto; on a CPU none).
    use_grad_ckpt: bool | Literal["auto"] | EveryNth = False
    # Keep activations in the host's memory until the backward pass needs them: a GPU's memory for time on the bus.
    offload_activations: bool = False
    # Flash attention on GPUs that have it (not V100); auto tries all exact kernels at the start, and takes the fastest.
    use_flash_attn: bool | Literal["auto"] = "auto"
    # Compile each block with torch.compile; auto does where it is known to help: on GPUs from Ampere on.
    compile: bool | Literal["auto"] = "auto"
    # Only kernels whose sums have the same order each time: on a GPU without it no two runs are equal to the last bit.
    deterministic: bool = False
    # Take the products of an fp32 run to tensor cores, with 10 bits of each factor (a GPU from Ampere on).
    tf32: bool = False

    # Record these steps on every rank, from the first to the last: a timeline of what each did and when it waited.
    profile_steps: tuple[int, int] | None = None
    # A line of metrics is printed every so many steps where no progress bar can be shown.
    steps_per_print: int = Field(default=1, ge=1)

    @field_validator("use_grad_ckpt", mode="before")
    @classmethod
    def _one_of_its_forms(cls, value: Any) -> Any:
        every = value.get("every") if isinstance(value, dict) and len(value) == 1 else None
        if not (isinstance(value, (bool, EveryNth)) or value == "auto" or (type(every) is int and every > 0)):
            raise ValueError("expected true, false, auto or {every: n}")
        return value

    @field_validator("use_flash_attn", "compile", mode="before")
    @classmethod
    def _boolean_or_auto(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value != "auto":
            raise ValueError("expected true, false or auto")
        return value

    @field_validator("profile_steps", mode="before")
    @classmethod
    def _first_and_last(cls, value: Any) -> Any:
        steps = value if isinstance(value, (list, tuple)) and len(value) == 2 else [0, 0]
        if value is not None and not (all(type(step) is int for step in steps) and 1 <= steps[0] <= steps[1]):
            raise ValueError("expected [first, last], two steps from 1")
        return value

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        for contradiction in contradictions(self):
            raise ValueError(contradiction)
        return self

    @property
    def v_schedule(self) -> bool:
        """Whether each stage holds two chunks of the layers. With one stage there is nothing to wait for."""
        return self.schedule == "dualpipev" and self.model_topo.stages > 1

    def compiles(self, ampere: bool, experts: bool) -> bool:
        """Whether blocks, with experts or without, are compiled on a GPU from Ampere on, or elsewhere."""
        return self.compile if self.compile != "auto" else ampere and self.compile_obstacle(experts) is None

    def compile_obstacle(self, experts: bool) -> str | None:
        """Why `compile: auto` leaves blocks as they are on any GPU, if it does."""
        if experts:
            return "how many tokens an expert gets changes with every micro-batch"
        return "ZeRO stage 3 gathers weights inside of them" if self.zero_optimization.stage == 3 else None

    def has_flash(self, ampere: bool) -> bool:
        """Whether attention holds no scores, on a GPU from Ampere on or elsewhere."""
        return bool(self.use_flash_attn) and ampere and (self.bf16.enabled or self.fp16.enabled)

    @property
    def chunks(self) -> int:
        """Into how many the layers are divided."""
        return self.model_topo.stages * (2 if self.v_schedule else 1)

    @property
    def least_micro_batches(self) -> int:
        """How many micro-batches a step needs for each replica; 0 where the schedule does not ask."""
        return self.chunks if self.v_schedule else 0

    @property
    def sums_while_computing(self) -> bool:
        """Whether the replicas in a pipeline sum their gradients while they compute (`training.engine.replica_sums`).

        Not with an offloaded optimizer, nor with keys that say how DeepSpeed is to do it.
        """
        zero = self.zero_optimization
        deepspeeds = zero.offloads or self.data_types or DEEPSPEEDS_SUMS & set(zero.model_extra or {})
        return self.model_topo.replicas > 1 and zero.stage == 1 and not deepspeeds

    def check_door(self, in_stages: bool) -> None:
        """Refuse what only the other of the two training doors can do.

        Raises:
            ConfigError: in a pipeline a stage of ZeRO that shards what it needs whole, or without one several stages.
        """
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

    def recomputed(self, n_blocks: int) -> frozenset[int]:
        """The layers of the blocks 1 .. `n_blocks` that recompute; with `auto` all that may have to."""
        if not self.use_grad_ckpt:
            return frozenset()
        step = self.use_grad_ckpt.every if isinstance(self.use_grad_ckpt, EveryNth) else 1
        return frozenset(range(step, n_blocks + 1, step))

    def parts_for(self, n_layers: int) -> list[int] | None:
        """Layers per stage, or per chunk, for a model of `n_layers`, checked; None where `training.plan.auto` chooses.

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

    def with_parts(self, parts: list[int]) -> TrainConfig:
        """The same config with these layers per stage, which stay; with an empty list `parts: auto`."""
        topo = self.model_topo.model_copy(update={"parts": parts or None})
        return self.model_copy(update={"model_topo": topo, "rebalance": False})

    def dump(self) -> dict[str, Any]:
        """The resolved config as plain values, ready for YAML."""
        return self.model_dump(mode="json", exclude_none=True)

"""Keys of what a run trains, on what, and what it keeps; those of how it is spread and computed are in `keys`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from data.chat.prompts import PromptFormat
from data.settings import Fallback, Mask, OnBadRecord, Packing, TemplateArguments, Truncate
from training.config.objective import LoraSection, RouterLoss, ZLoss
from training.config.optimization import Optimizer, Scheduler, Zero
from training.config.precision import BF16, FP8, FP16, DataTypes, Precision
from training.config.section import DataPath, NewPathText, PathText, Section, expected

LONGEST = 2**24  # tokens: of a sample or a row
YEAR = 366 * 24 * 60  # minutes
Port = Annotated[int, Field(ge=1, le=65535)]


class TrackerSwitch(Section):
    """A tracker of `trackers`."""

    enabled: bool | None = Field(default=None, exclude=True)
    """`true` adds it to `trackers`, `false` takes it out."""


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


class RunKeys(Section):
    """What a run trains, on what, and what it keeps: model, records, batches, optimizer, precision, checkpoints."""

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

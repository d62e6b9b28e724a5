"""Translate the arguments that all tools over transformers' Trainer share: batches, rates, precision, intervals.

Each tool calls some of them otherwise and has other defaults; it says so in two tables, and the rest is the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from options.other_tools.draft import Draft, as_list, is_true
from training.config.foreign_names import VALUES

# transformers 5's TrainingArguments, where a tool does not say otherwise.
USUAL: dict[str, Any] = {
    "learning_rate": 5e-5,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "gradient_checkpointing": False,
    "bf16": False,
}
OPTIMIZERS, SCHEDULES = VALUES["optimizer.type"], VALUES["scheduler.type"]
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")
# What changes neither a weight nor a file of the run.
WITHOUT_EFFECT = """do_train do_eval overwrite_output_dir overwrite_cache plot_loss ddp_timeout ddp_backend
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    preprocessing_num_workers dataset_num_proc dataset_processes remove_unused_columns ddp_find_unused_parameters
    logging_first_step logging_dir logging_strategy save_safetensors use_liger_kernel enable_liger_kernel use_unsloth
    group_by_length per_device_eval_batch_size eval_batch_size torch_compile tf32 use_cache save_only_model
    gradient_checkpointing_kwargs strict attn_implementation flash_attn flash_attention attn_impl
    sdp_attention xformers_attention model_kwargs eval_accumulation_steps padding_free bf16_full_eval
    include_num_input_tokens_seen disable_tqdm val_set_shuffle dataset_prepared_path
    use_hf ignore_args_error tuner_backend""".split()


def training_arguments(draft: Draft, devices: int, folder: Path, usual: Mapping[str, Any]) -> None:
    """Take all of these arguments.

    Args:
        devices: that the tool would train on, each with a batch of its own.
        usual: what the tool takes without the key, where it is not transformers' own default.
    """
    usual = USUAL | dict(usual)
    _batches(draft, devices, usual)
    _optimizer(draft, usual)
    _schedule(draft, usual)
    draft.move("gradient_clipping", "max_grad_norm", otherwise=usual["max_grad_norm"], by=float)
    draft.move("seed", "seed", otherwise=usual["seed"])
    _precision(draft, usual)
    _intervals(draft)
    _deepspeed(draft, folder)
    draft.drop(*WITHOUT_EFFECT)


def _batches(draft: Draft, devices: int, usual: dict[str, Any]) -> None:
    rows = int(draft.take("per_device_train_batch_size", otherwise=usual["per_device_train_batch_size"]))
    least = usual.get("least_batch", 0)
    accumulated = draft.take("gradient_accumulation_steps", otherwise=usual["gradient_accumulation_steps"])
    if accumulated in (None, "auto"):  # ms-swift: as many as make a batch of 16
        accumulated = max(1, math.ceil(least / (rows * devices)))
    batch = rows * int(accumulated) * devices
    note = f"{rows} a device x {accumulated} accumulated x {devices} device{'s' if devices > 1 else ''}"
    draft.put("train_batch_size", batch, note)
    draft.put("train_micro_batch_size_per_gpu", "auto", "chosen by the planner; it changes the speed alone")

    steps = int(draft.take("max_steps", otherwise=-1))
    if steps > 0:
        draft.put("max_steps", steps, f"max_steps: {steps}")
    epochs = float(draft.take("num_train_epochs", otherwise=usual["num_train_epochs"]))
    draft.put("n_epoches", max(1, math.ceil(epochs)), f"num_train_epochs: {epochs:g}")
    if epochs != int(epochs) and steps <= 0:
        draft.lost[f"num_train_epochs: {epochs:g}"] = f"passes are whole here: {math.ceil(epochs)}; or set max_steps"


def _optimizer(draft: Draft, usual: dict[str, Any]) -> None:
    name = str(draft.take("optim", otherwise="adamw_torch"))
    rule = OPTIMIZERS.get(name)
    rule = None if rule == "Adafactor" else rule  # which needs fp32 and other rates
    draft.put("optimizer.type", rule or "AdamW", f"optim: {name}")
    if rule is None:
        draft.lost[f"optim: {name}"] = "AdamW is taken; another learning rate may be right for it"
    elif "8bit" in name:
        draft.differs.append(f"optim: {name}: the optimizer's states have 32 bits here")
    params = "optimizer.params"
    draft.move(f"{params}.lr", "learning_rate", otherwise=usual["learning_rate"], by=float)
    if rule != "SGD":
        betas = [float(draft.take(beta, otherwise=usual[beta])) for beta in ("adam_beta1", "adam_beta2")]
        draft.put(f"{params}.betas", betas, "adam_beta1, adam_beta2")
    if rule in (None, "AdamW"):
        draft.move(f"{params}.eps", "adam_epsilon", otherwise=usual["adam_epsilon"], by=float)
    draft.move(f"{params}.weight_decay", "weight_decay", otherwise=usual["weight_decay"], by=float)
    draft.drop("adam_beta1", "adam_beta2", "adam_epsilon")
    draft.put("optimizer.no_wd_kws", ["norm", "bias$"], "as transformers' Trainer leaves norms and biases out")


def _schedule(draft: Draft, usual: dict[str, Any]) -> None:
    name = str(draft.take("lr_scheduler_type", otherwise=usual["lr_scheduler_type"]))
    kind, params = SCHEDULES.get(name, "linear"), "scheduler.params"
    draft.put("scheduler.type", kind, f"lr_scheduler_type: {name}")
    if name not in SCHEDULES:
        draft.lost[f"lr_scheduler_type: {name}"] = "linear is taken; WarmupCosineLR, constant and WSD are there too"

    steps, share = float(draft.take("warmup_steps", otherwise=0)), float(draft.take("warmup_ratio", otherwise=0))
    if 0 < steps < 1:  # transformers 5 reads it as a share
        steps, share = 0, steps
    if steps:
        draft.put(f"{params}.warmup_num_steps", int(steps), f"warmup_steps: {steps:g}")
    elif share:
        draft.put(f"{params}.warmup_ratio", share, f"warmup_ratio: {share:g}")
    draft.put(f"{params}.warmup_type", "linear", "warm-ups of transformers are straight lines")

    more = draft.take("lr_scheduler_kwargs", otherwise={})
    more = json.loads(more) if isinstance(more, str) else more
    rate, least = draft.ours["optimizer.params.lr"], draft.take("cosine_min_lr_ratio", otherwise=0.0)
    least = more.get("min_lr_rate", more.get("min_lr", least * rate) / rate if rate else 0.0)
    if kind != "constant":
        end = "cos_min_ratio" if kind == "WarmupCosineLR" else "min_ratio"
        draft.put(f"{params}.{end}", float(least), "where transformers' schedule ends")
    draft.differs.append("a step has the rate that transformers' next one has: none has a rate of 0")


def _precision(draft: Draft, usual: dict[str, Any]) -> None:
    half = is_true(draft.take("fp16", otherwise=False))
    brain = is_true(draft.take("bf16", "pure_bf16", otherwise=usual["bf16"] and not half))
    draft.drop("pure_bf16", "upcast_layernorm", "upcast_lmhead_output", "float32", "fp16_full_eval")
    if half:
        draft.put("fp16.enabled", True, "fp16: true")
    elif brain:
        draft.put("bf16.enabled", True, "bf16: true")
    checkpointing = draft.take("gradient_checkpointing", otherwise=usual["gradient_checkpointing"])
    draft.put("use_grad_ckpt", "auto", f"gradient_checkpointing: {checkpointing}; as many blocks as memory asks for")


def _intervals(draft: Draft) -> None:
    """Take how often is logged, saved and evaluated."""
    draft.move("steps_per_print", "logging_steps", by=lambda steps: max(1, int(steps)))
    draft.move("keep_last", "save_total_limit", by=lambda most: max(1, int(most)))
    kinds = [("save_interval", "save_steps", "save_strategy")]
    if draft.ours.keys() & {"eval_data_path", "eval_share"}:
        kinds.append(("eval_interval", "eval_steps", "eval_strategy"))
    for ours, steps, strategy in kinds:
        how, number = draft.take(strategy, "evaluation_strategy", otherwise="steps"), draft.take(steps)
        if number is not None and how == "steps" and float(number) >= 1:
            draft.put(ours, int(number), f"{steps}: {number}")
        elif number is not None and 0 < float(number) < 1:
            draft.lost[f"{steps}: {number}"] = f"{ours} counts steps, not a share of them"
        elif how == "epoch" and ours == "save_interval":
            draft.lost[f"{strategy}: epoch"] = "saved at the end; save_interval: N or save_minutes: M saves between"
    draft.drop("eval_steps", "eval_strategy", "evaluation_strategy")
    draft.move("resume", "resume_from_checkpoint", by=lambda value: value if isinstance(value, str) else "auto")

    if draft.has("report_to", "use_swanlab"):
        names = as_list(draft.take("report_to", otherwise=[]))
        names += ["swanlab"] if is_true(draft.take("use_swanlab", otherwise=False)) else []
        kept = [name for name in names if name in TRACKERS]
        draft.put("trackers", ["tensorboard"] if names == ["all"] else kept, f"report_to: {', '.join(map(str, names))}")
    run = draft.take("run_name", "swanlab_run_name", "wandb_name")
    for tracker in draft.ours.get("trackers", []):
        if run and tracker != "tensorboard":
            draft.put(f"{tracker}.name", str(run), "run_name")
    draft.move("wandb.project", "wandb_project")
    draft.move("swanlab.project", "swanlab_project")


def _deepspeed(draft: Draft, folder: Path) -> None:
    """Take the offloading of a DeepSpeed file; the pipeline divides the layers, so its stage is not needed."""
    name = draft.take("deepspeed")
    if name is None:
        return
    why = "the pipeline divides the layers instead; train_ds_zero.py has ZeRO's stages 2 and 3"
    file = folder / str(name)
    try:
        zero = json.loads(file.read_text(encoding="utf-8")).get("zero_optimization", {})
    except (OSError, ValueError, AttributeError):
        zero = {}
    if (zero.get("offload_optimizer") or {}).get("device") == "cpu":
        draft.put("zero_optimization.offload_optimizer.device", "cpu", f"deepspeed: {name}")
    draft.lost[f"deepspeed: {name}"] = why

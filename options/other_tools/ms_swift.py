"""Translate a config or a command line of ms-swift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from options.other_tools.adapters import Adapter, put_adapter
from options.other_tools.draft import Draft, as_list, is_true, source
from options.other_tools.training_arguments import training_arguments

USUAL = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": None,
    "least_batch": 16,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "bf16": True,  # of config.json there, which says so for nearly all models
    "gradient_checkpointing": True,
}
LOSSES = {"dpo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto", "rm": "reward"}
MASKS = {"default": "assistant", "last_round": "last_turn", "all": "all"}


def translate(draft: Draft, method: str, devices: int, folder: Path) -> None:
    """Take all keys; `method` is `sft`, `pt` or `rlhf`."""
    draft.move("model_path", "model")
    draft.move("save_path", "output_dir", otherwise="output")
    for ours, theirs in (("data_path", "dataset"), ("eval_data_path", "val_dataset")):
        if names := draft.take(theirs):
            draft.put(ours, [_entry(draft, str(name)) for name in as_list(names)], f"{theirs}: {names}")
    if share := float(draft.take("split_dataset_ratio", otherwise=0)):
        draft.put("eval_share", share, f"split_dataset_ratio: {share}")

    if (longest := draft.take("max_length")) is not None:
        draft.put("max_seq_len", int(longest), f"max_length: {longest}")
    else:
        draft.lost["max_length: the model's longest"] = "max_seq_len: 2048 is taken"
    strategy = draft.take("truncation_strategy", otherwise="delete")
    draft.lost[f"truncation_strategy: {strategy}"] = "longer dialogues are cut at a turn's end (`truncate`) and counted"
    packed = is_true(draft.take("packing", otherwise=False))
    draft.put("packing", "dataset" if packed else "batch", f"packing: {packed}")

    kind = draft.take("rlhf_type", otherwise="dpo" if method == "rlhf" else None)
    scale = draft.take("loss_scale", otherwise={"pt": "all", "rlhf": "last_round"}.get(method, "default"))
    if kind is None:
        draft.put("mask", MASKS.get(scale, "assistant"), f"loss_scale: {scale}")
    if scale not in MASKS:
        draft.lost[f"loss_scale: {scale}"] = "all trained tokens count alike"
    draft.lose("template", "the tokenizer's own chat template is taken; --inspect 2 shows it")
    draft.lose("system", "write it as the system message of the records")
    draft.drop("template_backend", "model_type", "task_type", "load_from_cache_file", "dataset_shuffle", "data_seed")
    draft.drop("model_name", "model_author", "train_dataloader_shuffle", "agent_template", "max_pixels")
    _preference(draft, kind)

    dtype = str(draft.take("torch_dtype", "dtype", otherwise="bfloat16"))
    if dtype != "bfloat16" and not draft.has("bf16", "fp16"):
        draft.put_back("fp16", dtype == "float16")
        draft.put_back("bf16", False)

    tuner = draft.take("tuner_type", "train_type", "sft_type", otherwise="lora")
    if tuner not in ("lora", "full"):
        raise draft.refuse("tuner_type", tuner, "lora or full")
    found = Adapter(
        r=draft.take("lora_rank", otherwise=8),
        alpha=draft.take("lora_alpha", otherwise=32),
        dropout=draft.take("lora_dropout", otherwise=0.05),
        targets=draft.take("target_modules", otherwise="all-linear"),
        saved=draft.take("modules_to_save"),
        bits=draft.take("quant_bits"),
    )
    put_adapter(draft, found, tuner == "lora")
    training_arguments(draft, devices, folder, USUAL | {"learning_rate": 1e-4 if tuner == "lora" else 1e-5})


def _entry(draft: Draft, name: str) -> Any:
    """Return the entry of data_path for `NAME:SUBSET#NUMBER`."""
    name, _, number = name.partition("#")
    name, _, subset = name.partition(":")
    if number:
        draft.lost[f"{name}#{number}"] = "all records are taken; `repeat: 0.5` takes half of them"
    return source(name, subset=subset)


def _preference(draft: Draft, kind: str | None) -> None:
    if kind is None:
        return
    if kind not in LOSSES:
        raise draft.refuse("rlhf_type", kind, ", ".join(LOSSES))
    theirs = draft.take("loss_type", otherwise="sigmoid")
    if kind == "dpo" and theirs not in ("sigmoid", "ipo"):
        raise draft.refuse("loss_type", theirs, "sigmoid or ipo")
    draft.put("preference.loss", "ipo" if theirs == "ipo" else LOSSES[kind], f"rlhf_type: {kind}")
    if kind != "rm":
        draft.move("preference.beta", "beta", otherwise=2.0 if kind == "simpo" else 0.1, by=float)
        draft.move("preference.sft_weight", "rpo_alpha", by=float)
    if kind == "simpo":
        draft.move("preference.gamma", "simpo_gamma", otherwise=1.0, by=float)
    draft.move("preference.desirable_weight", "desirable_weight", by=float)
    draft.move("preference.undesirable_weight", "undesirable_weight", by=float)
    draft.lose("ref_model", "the reference is the model that training begins with")

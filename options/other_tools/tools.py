"""Settle what only one tool has, before the keys of all are walked: in words that all share, or at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from data.errors import DataError
from data.records.raw_records import read_file
from options.other_tools.draft import Draft
from options.other_tools.entries import source
from options.other_tools.reading import as_list, is_true

PEFT = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
PAIRED = {"beta", "precompute_ref_log_probs", "ref_model", "rpo_alpha", "label_smoothing", "reference_free"}
MARKED = {"desirable_weight", "undesirable_weight"}
SCALES = {"default": "assistant", "last_round": "last_turn", "all": "all"}


def _llama_factory(draft: Draft) -> None:
    draft.method = draft.take("stage", otherwise="sft")
    draft.usual["lora.alpha"] = 2 * int(draft.left.get("lora_rank", 8))
    packed, neat = is_true(draft.take("packing")), is_true(draft.take("neat_packing"))
    draft.left["neat_packing"] = packed or neat
    if packed and not neat:
        draft.differs.append("packing: samples in one row do not see each other here, as with neat_packing")
    if draft.method == "pt":
        draft.put("mask", "all", "stage: pt")


def _axolotl(draft: Draft) -> None:
    left = draft.left
    draft.method = draft.take("rl", otherwise="sft")
    if "optimizer" in left:
        left["optim"] = left.pop("optimizer")
    if not left.keys() & {"warmup_steps", "warmup_ratio"}:
        left["warmup_ratio"] = 0.03  # what axolotl takes without either
    if texts := draft.take("pretraining_dataset"):
        left["datasets"] = texts
        draft.put("mask", "all", "pretraining_dataset")
    if is_true(draft.take("lora_target_linear")):
        left["lora_target_modules"] = "all"


def _trl(draft: Draft) -> None:
    peft = draft.take("peft_config", otherwise={})
    left = {PEFT.get(name, name): value for name, value in peft.items()}
    left = draft.left = {"use_peft": bool(peft)} | left | draft.left
    marked, paired = left.keys() & MARKED, left.keys() & PAIRED
    draft.method = draft.method or ("kto" if marked else "") or ("dpo" if paired else "sft")
    if revision := draft.take("model_revision"):
        left["model_name_or_path"] = f"{left['model_name_or_path']}@{revision}"

    _data_set(draft)
    if draft.method == "sft":
        only = draft.take("completion_only_loss")
        assistant = is_true(draft.take("assistant_only_loss"))
        only = _has_completions(draft) if only is None and not assistant else is_true(only)
        why = "assistant_only_loss, completion_only_loss; without them completions, and dialogues whole"
        draft.put("mask", "assistant" if assistant or only else "all", why)
        draft.differs.append("records of prompt and completion are written with the chat template, where there is one")


def _trainer(draft: Draft) -> None:
    draft.method = "sft"
    _data_set(draft)
    draft.put("mask", "all", "transformers' Trainer trains all tokens")
    draft.differs.append("run_clm.py fills its blocks with texts that see each other; a text sees no other here")


def _data_set(draft: Draft) -> None:
    """Describe a data set that is called by its name or path."""
    subset = draft.take("dataset_config", "dataset_config_name")
    split, held_out = draft.take("dataset_train_split"), draft.take("dataset_test_split")
    if name := draft.left.get("dataset_name"):
        draft.left["dataset_name"] = {"path": name, "name": subset, "split": split}
        if source(name, split=held_out) != name and draft.left.keys() & {"eval_strategy", "eval_steps"}:
            draft.left["validation_file"] = {"path": name, "name": subset, "split": held_out}


def _has_completions(draft: Draft) -> bool:
    """Look whether the first record has a completion, where the records lie here."""
    for entry in as_list(draft.left.get("dataset_name") or draft.left.get("datasets") or []):
        file = draft.theirs.folder / str(entry["path"])
        try:
            first: Any = next(iter(read_file(file))).value
            record = json.loads(first) if isinstance(first, bytes) else first
        except (OSError, ValueError, StopIteration, DataError):
            continue
        return isinstance(record, dict) and "completion" in record
    return False


def _ms_swift(draft: Draft) -> None:
    method, left = draft.method or "sft", draft.left
    draft.method = draft.take("rlhf_type", otherwise="dpo" if method == "rlhf" else method)
    if "max_length" not in left:
        draft.lost["max_length: the model's longest"] = "max_seq_len: 2048 is taken"
    strategy = draft.take("truncation_strategy", otherwise="delete")
    draft.lost[f"truncation_strategy: {strategy}"] = "longer dialogues are cut at a turn's end (`truncate`) and counted"
    scale = draft.take("loss_scale", otherwise={"pt": "all", "rlhf": "last_round"}.get(method, "default"))
    draft.put("mask", SCALES.get(scale, "assistant"), f"loss_scale: {scale}")
    if scale not in SCALES:
        draft.lost[f"loss_scale: {scale}"] = "all trained tokens count alike"
    dtype = str(draft.take("torch_dtype", "dtype", otherwise="bfloat16"))
    if dtype != "bfloat16" and not left.keys() & {"bf16", "fp16"}:
        left |= {"fp16": dtype == "float16", "bf16": False}


# What only this tool has, settled before the keys of all are walked.
PREPARE: dict[str, Callable[[Draft], None]] = {
    "LLaMA-Factory": _llama_factory,
    "axolotl": _axolotl,
    "TRL": _trl,
    "HF Trainer": _trainer,
    "ms-swift": _ms_swift,
}

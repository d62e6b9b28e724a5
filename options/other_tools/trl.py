"""Translate a config or a command line of TRL, and of transformers' Trainer as run_clm.py has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.records.raw_records import read_file
from options.other_tools.adapters import Adapter, put_adapter
from options.other_tools.draft import Draft, as_list, is_true, source
from options.other_tools.training_arguments import training_arguments

LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "apo_zero_unpaired": "apo_zero_unpaired", "kto": "kto"}
PAIRED = {"beta", "precompute_ref_log_probs", "ref_model", "rpo_alpha", "label_smoothing", "reference_free"}
RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "orpo": 1e-6, "cpo": 1e-6, "reward": 1e-4}  # TRL's defaults
USUAL = {"gradient_checkpointing": True, "bf16": True}
METHODS = "sft, dpo, kto, orpo, cpo (loss_type: simpo) and reward"


def translate(draft: Draft, method: str, devices: int, folder: Path) -> None:
    """Take all keys; `method` is a word such as `dpo`, guessed from the keys where it is empty."""
    method = method or _method(draft)
    if method not in RATES:
        raise draft.refuse("trl", method, METHODS)
    draft.move("model_path", "model_name_or_path")
    if revision := draft.take("model_revision"):
        draft.put("model_path", f"{draft.ours['model_path']}@{revision}", f"model_revision: {revision}")
    draft.move("save_path", "output_dir", otherwise="trainer_output")
    _data(draft)
    draft.move("max_seq_len", "max_length", "max_seq_length", otherwise=1024, by=int)
    draft.lose("max_prompt_length", "max_seq_len counts prompt and answer together")
    packed = is_true(draft.take("packing", otherwise=False))
    draft.put("packing", "dataset" if packed else "batch", f"packing: {packed}")
    draft.move("prompt_format", "chat_template_path")
    if method == "sft":
        _mask(draft, folder)
    else:
        _preference(draft, method)

    wanted = is_true(draft.take("use_peft", otherwise=draft.has("peft_config")))
    peft = draft.take("peft_config", otherwise={})
    four, eight = (is_true(draft.take(name, otherwise=False)) for name in ("load_in_4bit", "load_in_8bit"))
    small = 8 if eight else None
    found = Adapter(
        r=draft.take("lora_r", otherwise=peft.get("r", 16)),
        alpha=draft.take("lora_alpha", otherwise=peft.get("lora_alpha", 32)),
        dropout=draft.take("lora_dropout", otherwise=peft.get("lora_dropout", 0.05)),
        targets=draft.take("lora_target_modules", otherwise=peft.get("target_modules", ["q_proj", "v_proj"])),
        saved=draft.take("lora_modules_to_save", otherwise=peft.get("modules_to_save")),
        bits=4 if four else small,
    )
    put_adapter(draft, found, wanted)
    draft.drop("use_peft", "dataset_kwargs", "model_init_kwargs", "pad_token", "eos_token", "shuffle_dataset")
    training_arguments(draft, devices, folder, USUAL | {"learning_rate": RATES[method]})


def translate_trainer(draft: Draft, _: str, devices: int, folder: Path) -> None:
    """Take the keys of transformers' run_clm.py: texts, all of whose tokens are trained."""
    draft.move("model_path", "model_name_or_path")
    draft.move("save_path", "output_dir")
    draft.move("data_path", "train_file", by=as_list)
    draft.move("eval_data_path", "validation_file", by=as_list)
    _data(draft)
    if share := draft.take("validation_split_percentage"):
        draft.put("eval_share", float(share) / 100, f"validation_split_percentage: {share}")
    draft.move("max_seq_len", "block_size", "model_max_length", otherwise=1024, by=int)
    draft.put("mask", "all", "transformers' Trainer trains all tokens")
    draft.put("packing", "dataset", "as run_clm.py fills its blocks; a text sees no other here")
    draft.drop("use_fast_tokenizer", "low_cpu_mem_usage", "config_overrides", "streaming")
    training_arguments(draft, devices, folder, {})


def _method(draft: Draft) -> str:
    if draft.has("desirable_weight", "undesirable_weight"):
        return "kto"
    return "dpo" if draft.has(*PAIRED) else "sft"


def _data(draft: Draft) -> None:
    """Take a data set by its name or path, or a mixture of them."""
    name, subset = draft.take("dataset_name"), draft.take("dataset_config", "dataset_config_name")
    split, held_out = draft.take("dataset_train_split"), draft.take("dataset_test_split")
    if name:
        draft.put("data_path", [source(name, subset=subset, split=split)], f"dataset_name: {name}")
        test = source(name, subset=subset, split=held_out)
        if test != name and held_out and draft.has("eval_strategy", "eval_steps"):
            draft.put("eval_data_path", [test], f"dataset_test_split: {held_out}")
    if mixture := draft.take("datasets"):
        entries = [source(each["path"], subset=each.get("name"), split=each.get("split")) for each in mixture]
        draft.put("data_path", entries, "datasets")


def _mask(draft: Draft, folder: Path) -> None:
    """Take which tokens are trained: without a key completions, and all tokens of dialogues."""
    assistant = is_true(draft.take("assistant_only_loss", otherwise=False))
    completion = draft.take("completion_only_loss")
    if completion is None and not assistant:
        completion = _has_completions(draft, folder)
    only = assistant or is_true(completion)
    why = "assistant_only_loss, completion_only_loss; without them completions, and dialogues whole"
    draft.put("mask", "assistant" if only else "all", why)
    if (loss := draft.take("loss_type")) not in (None, "nll", "chunked_nll"):
        raise draft.refuse("loss_type", loss, "nll")
    draft.lose("dataset_text_field", "`columns: {text: NAME}` in an entry of data_path")
    draft.differs.append("records of prompt and completion are written with the chat template, where there is one")


def _has_completions(draft: Draft, folder: Path) -> bool:
    """Look whether the first record has a completion, where the records lie here."""
    for entry in draft.ours.get("data_path", []):
        file = folder / str(entry["path"] if isinstance(entry, dict) else entry)
        try:
            first: Any = next(iter(read_file(file))).value
            record = json.loads(first) if isinstance(first, bytes) else first
        except (OSError, ValueError, StopIteration, DataError):
            continue
        return isinstance(record, dict) and "completion" in record
    return False


def _preference(draft: Draft, method: str) -> None:
    theirs = draft.take("loss_type", otherwise={"dpo": "sigmoid", "cpo": "sigmoid"}.get(method, method))
    theirs = theirs[0] if isinstance(theirs, list) and len(theirs) == 1 else theirs
    known = {"dpo": ("sigmoid", "ipo"), "cpo": ("simpo",), "kto": ("kto", "apo_zero_unpaired")}.get(method, (method,))
    if theirs not in known:
        raise draft.refuse("loss_type", theirs, f"{', '.join(known)}, or another trainer")
    smoothing = draft.take("label_smoothing")
    loss = "cdpo" if smoothing and method == "dpo" else LOSSES.get(str(theirs), str(theirs))
    draft.put("preference.loss", loss, f"{method}, loss_type: {theirs}")
    if smoothing and loss == "cdpo":
        draft.put("preference.label_smoothing", float(smoothing), f"label_smoothing: {smoothing}")
    if method != "reward":
        draft.move("preference.beta", "beta", otherwise=0.1, by=float)
        draft.move("preference.sft_weight", "rpo_alpha", by=float)
    else:
        draft.move("preference.center_weight", "center_rewards_coefficient", by=float)
    draft.move("preference.gamma", "simpo_gamma", otherwise=0.5 if theirs == "simpo" else None, by=float)
    draft.move("preference.desirable_weight", "desirable_weight", by=float)
    draft.move("preference.undesirable_weight", "undesirable_weight", by=float)
    draft.lose("ref_model", "the reference is the model that training begins with")
    draft.drop("precompute_ref_log_probs", "generate_during_eval", "disable_dropout", "truncation_mode")

"""Translate a config of axolotl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from options.other_tools.adapters import Adapter, put_adapter
from options.other_tools.draft import Draft, as_list, is_true, source
from options.other_tools.training_arguments import training_arguments

NAMES = {  # transformers' names of its own ones
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
}
USUAL = {"per_device_train_batch_size": 1, "num_train_epochs": 1, "lr_scheduler_type": "cosine"}
LOSSES = {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
FIELDS = {"field_messages": "messages", "field_tools": "tools", "field": "text"}
FIELDS |= {"message_field_role": "role", "message_field_content": "content"}
PAIRS = {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}
TEMPLATES = ("chat_template", "chat_template.default")
DEFAULT = ("tokenizer_default", None)


def translate(draft: Draft, _: str, devices: int, folder: Path) -> None:
    """Take all keys."""
    draft.move("model_path", "base_model")
    draft.move("save_path", "output_dir", otherwise="model-out")
    for theirs, ours in NAMES.items():
        if draft.has(theirs):
            draft.put_back(ours, draft.take(theirs))
    if not draft.has("warmup_steps", "warmup_ratio"):
        draft.put_back("warmup_ratio", 0.03)  # what axolotl takes without either

    for ours, theirs in (("data_path", "datasets"), ("eval_data_path", "test_datasets")):
        if entries := draft.take(theirs):
            draft.put(ours, [_entry(draft, each) for each in entries], theirs)
    if texts := draft.take("pretraining_dataset"):
        draft.put("data_path", as_list(texts), "pretraining_dataset")
        draft.put("mask", "all", "pretraining_dataset")
    share = float(draft.take("val_set_size", otherwise=0))
    if 0 < share < 1:
        draft.put("eval_share", share, f"val_set_size: {share}")
    elif share:
        draft.lost[f"val_set_size: {share:g}"] = "eval_share is a share of the records, not their number"

    draft.move("max_seq_len", "sequence_len", otherwise=512, by=int)
    packed = is_true(draft.take("sample_packing", otherwise=False))
    draft.put("packing", "dataset" if packed else "batch", f"sample_packing: {packed}")
    if is_true(draft.take("train_on_inputs", otherwise=False)):
        draft.put("mask", "all", "train_on_inputs: true")
    _template(draft)
    _preference(draft)

    kind = draft.take("adapter")
    if kind not in (None, "", "lora", "qlora"):
        raise draft.refuse("adapter", kind, "lora or qlora")
    linear, eight = is_true(draft.take("lora_target_linear")), is_true(draft.take("load_in_8bit"))
    four = is_true(draft.take("load_in_4bit")) or kind == "qlora"
    small = 8 if eight else None
    found = Adapter(
        r=draft.take("lora_r", otherwise=8),
        alpha=draft.take("lora_alpha", otherwise=16),
        dropout=draft.take("lora_dropout", otherwise=0.0),
        targets="all" if linear else draft.take("lora_target_modules", otherwise="all"),
        saved=draft.take("lora_modules_to_save"),
        bits=4 if four else small,
    )
    put_adapter(draft, found, bool(kind))
    for each in ("saves_per_epoch", "evals_per_epoch"):
        draft.lose(each, "save_interval and eval_interval count steps; an epoch's end is evaluated without them")
    draft.drop("lora_target_modules", "pad_to_sequence_len", "eval_sample_packing", "sample_packing_eff_est")
    draft.drop("tokenizer_type", "model_type", "is_llama_derived_model", "eval_table_size", "eval_max_new_tokens")
    draft.drop("wandb_entity", "wandb_watch", "wandb_log_model", "wandb_run_id", "auto_resume_from_checkpoints")
    draft.drop("debug", "local_rank", "lora_mlp_kernel", "lora_qkv_kernel")
    draft.drop("lora_o_kernel", "use_tensorboard", "chat_template_jinja")
    if draft.has("wandb_project") and not draft.has("report_to"):
        draft.put_back("report_to", ["wandb"])
    training_arguments(draft, devices, folder, USUAL)


def _entry(draft: Draft, entry: dict[str, Any]) -> Any:
    """Return the entry of data_path for one of theirs."""
    where = entry.get("data_files") or entry.get("path")
    kind = entry.get("type")
    kind = kind if isinstance(kind, str) else None
    fields = PAIRS if entry.get("field_chosen") else FIELDS
    columns = {ours: entry[theirs] for theirs, ours in fields.items() if entry.get(theirs)}
    columns |= entry.get("message_property_mappings") or {}
    columns = {ours: name for ours, name in columns.items() if ours != name}
    if columns.get("messages") == "conversations":  # ShareGPT, which is recognised
        columns = {}

    if kind == "alpaca":
        draft.put("prompt_format", "plain", "type: alpaca, whose text this is")
    elif kind == "completion":
        draft.put("mask", "all", "type: completion")
    elif kind and not kind.startswith(TEMPLATES):
        draft.lost[f"type: {kind}"] = "the layout is recognised, and written with the tokenizer's chat template"
    roles = entry.get("roles_to_train")
    if roles not in (None, [], ["assistant"], ["gpt"], ["assistant", "gpt"]):
        draft.lost[f"roles_to_train: {roles}"] = "the assistant's words are trained"
    entry_of_ours = source(where, split=entry.get("split"), subset=entry.get("name"))
    return {"path": where, "columns": columns} if columns else entry_of_ours


def _template(draft: Draft) -> None:
    jinja, name = draft.take("chat_template_jinja"), draft.take("chat_template")
    if jinja and str(jinja).endswith((".jinja", ".j2")):
        draft.put("prompt_format", jinja, f"chat_template_jinja: {jinja}")
    elif name not in DEFAULT:
        draft.lost[f"chat_template: {name}"] = "the tokenizer's own is taken; prompt_format takes a Jinja file"
    if tokens := draft.take("special_tokens"):
        draft.lost[f"special_tokens: {tokens}"] = "the tokenizer in model_path is taken as it is"


def _preference(draft: Draft) -> None:
    method = draft.take("rl")
    if method is None:
        return
    if method not in LOSSES:
        raise draft.refuse("rl", method, ", ".join(LOSSES))
    draft.put("preference.loss", LOSSES[method], f"rl: {method}")
    draft.move("preference.beta", "rl_beta", "dpo_beta", "orpo_alpha", otherwise=0.1, by=float)
    draft.move("preference.sft_weight", "rpo_alpha", by=float)
    if method == "simpo":
        draft.move("preference.gamma", "simpo_gamma", "cpo_simpo_gamma", otherwise=0.5, by=float)
    draft.move("preference.desirable_weight", "kto_desirable_weight", by=float)
    draft.move("preference.undesirable_weight", "kto_undesirable_weight", by=float)

"""Translate a config of LLaMA-Factory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from options.other_tools.adapters import Adapter, put_adapter
from options.other_tools.draft import Draft, as_list, is_true
from options.other_tools.training_arguments import training_arguments
from training.errors import ConfigError

LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
# What an entry's `columns` and `tags` call a field, and what `columns` here calls it.
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
TAGS |= {"system_tag": "system", "observation_tag": "tool"}
DEFAULTS = {"pref_beta": 0.1, "cutoff_len": 2048}


def translate(draft: Draft, method: str, devices: int, folder: Path) -> None:
    """Take all keys; `folder` is where its paths begin."""
    draft.move("model_path", "model_name_or_path")
    draft.move("save_path", "output_dir")
    stage = draft.take("stage", otherwise="sft")
    info = _dataset_info(draft.take("dataset_dir", otherwise="data"), folder)
    for ours, theirs in (("data_path", "dataset"), ("eval_data_path", "eval_dataset")):
        if names := draft.take(theirs):
            draft.put(ours, [_entry(draft, name, info, stage) for name in as_list(names)], f"{theirs}: {names}")
    _share(draft, draft.take("val_size", otherwise=0.0), "val_size")
    draft.lose("max_samples", "an entry of data_path takes `repeat`, a share of its records")

    draft.move("max_seq_len", "cutoff_len", otherwise=DEFAULTS["cutoff_len"], by=int)
    packed, neat = is_true(draft.take("packing")), is_true(draft.take("neat_packing"))
    draft.put("packing", "dataset" if packed or neat else "batch", "packing, neat_packing")
    if packed and not neat:
        draft.differs.append("packing: samples in one row do not see each other here, as with neat_packing")
    if stage == "pt":
        draft.put("mask", "all", "stage: pt")
    elif is_true(draft.take("train_on_prompt")):
        draft.put("mask", "all", "train_on_prompt: true")
    elif is_true(draft.take("mask_history")):
        draft.put("mask", "last_turn", "mask_history: true")
    if (template := draft.take("template")) is not None:
        draft.lost[f"template: {template}"] = "the tokenizer's own chat template is taken; --inspect 2 shows it"
    draft.drop("train_on_prompt", "mask_history", "do_predict", "predict_with_generate")

    _method(draft, str(stage))
    kind = draft.take("finetuning_type", otherwise="lora")
    if kind not in ("lora", "full"):
        raise draft.refuse("finetuning_type", kind, "lora or full")
    rank = int(draft.take("lora_rank", otherwise=8))
    found = Adapter(
        r=rank,
        alpha=draft.take("lora_alpha", otherwise=2 * rank),
        dropout=draft.take("lora_dropout", otherwise=0.0),
        targets=draft.take("lora_target", otherwise="all"),
        saved=draft.take("additional_target"),
        bits=draft.take("quantization_bit"),
    )
    put_adapter(draft, found, kind == "lora")
    training_arguments(draft, devices, folder, {})


def _method(draft: Draft, stage: str) -> None:
    """Take what is trained for: sentences, pairs, marked answers or rewards."""
    if stage not in ("sft", "pt", "dpo", "kto", "rm"):
        raise draft.refuse("stage", stage, "sft, pt, dpo, kto or rm")
    if stage == "rm":
        draft.put("preference.loss", "reward", "stage: rm")
    elif stage == "kto":
        draft.put("preference.loss", "kto", "stage: kto")
        draft.move("preference.beta", "pref_beta", otherwise=DEFAULTS["pref_beta"], by=float)
        draft.move("preference.desirable_weight", "kto_chosen_weight", by=float)
        draft.move("preference.undesirable_weight", "kto_rejected_weight", by=float)
    elif stage == "dpo":
        theirs, smoothing = draft.take("pref_loss", otherwise="sigmoid"), draft.take("dpo_label_smoothing")
        if theirs not in LOSSES:
            raise draft.refuse("pref_loss", theirs, ", ".join(LOSSES))
        draft.put("preference.loss", "cdpo" if smoothing else LOSSES[theirs], f"pref_loss: {theirs}")
        draft.move("preference.beta", "pref_beta", otherwise=DEFAULTS["pref_beta"], by=float)
        if smoothing:
            draft.put("preference.label_smoothing", float(smoothing), f"dpo_label_smoothing: {smoothing}")
        if theirs == "simpo":
            draft.move("preference.gamma", "simpo_gamma", otherwise=0.5, by=float)
        draft.move("preference.sft_weight", "pref_ftx", by=float)
    draft.drop("pref_beta", "pref_ftx", "pref_loss", "simpo_gamma", "kto_chosen_weight", "kto_rejected_weight")


def _share(draft: Draft, share: Any, name: str) -> None:
    """Take the share of records to evaluate on."""
    if 0 < float(share) < 1:
        draft.put("eval_share", float(share), f"{name}: {share}")
    elif share:
        draft.lost[f"{name}: {share}"] = "eval_share is a share of the records, not their number"


def _dataset_info(name: str, folder: Path) -> dict[str, Any]:
    """Read the list of data sets, by a path from where the command runs or from the config's folders; {} without."""
    places = [base / name / "dataset_info.json" for base in (Path(), folder, *folder.parents)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return {}
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    folder = file.parent
    return {name: entry | {"folder_of": str(folder)} for name, entry in info.items()}


def _entry(draft: Draft, name: str, info: dict[str, Any], stage: str) -> Any:
    """Return the entry of data_path for a data set's name."""
    entry = info.get(name)
    if entry is None:
        draft.lost[f"dataset: {name}"] = "no entry in dataset_info.json; write the file's path into data_path"
        return name
    if file := entry.get("file_name"):
        source: dict[str, Any] = {"path": str(Path(entry["folder_of"]) / file)}
    elif hub := entry.get("hf_hub_url"):
        source = {"path": hub} | {ours: entry[ours] for ours in ("split", "subset") if entry.get(ours)}
    else:
        draft.lost[f"dataset: {name}"] = "neither a file nor a data set on HuggingFace's hub"
        source = {"path": name}
    if entry.get("num_samples"):
        draft.lost[f"{name}.num_samples: {entry['num_samples']}"] = "`repeat` takes a share of the records"

    names = COLUMNS | ({"prompt": "text"} if stage == "pt" else {})
    renamed = {names.get(field, field): column for field, column in entry.get("columns", {}).items()}
    renamed |= {TAGS[tag]: word for tag, word in entry.get("tags", {}).items() if tag in TAGS}
    columns = {field: column for field, column in renamed.items() if field != column}
    if columns:
        source["columns"] = columns
    return source if len(source) > 1 else source["path"]

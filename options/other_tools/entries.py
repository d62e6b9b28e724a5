"""Translate data sets: what a tool's config names becomes an entry of data_path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from options.other_tools.draft import Draft
from training.errors import ConfigError

# What an entry of dataset_info.json calls a field in its `columns` and `tags`, and what `columns` here calls it.
REGISTERED = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
TAGS |= {"system_tag": "system", "observation_tag": "tool"}
# What an entry of axolotl's calls a field.
FIELDS = {"field_messages": "messages", "field_tools": "tools", "field": "text"}
FIELDS |= {"message_field_role": "role", "message_field_content": "content"}
PAIRS = {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}
TEMPLATES = ("chat_template", "chat_template.default")
ANSWERS: tuple[Any, ...] = (None, [], ["assistant"], ["gpt"], ["assistant", "gpt"])  # the roles that are trained here


def source(path: Any, columns: dict[str, str] | None = None, **more: Any) -> Any:
    """Return an entry of data_path; split and subset are a hub's, and files have none."""
    files = Path(str(path)).suffix or Path(str(path)).exists()
    more = {} if files else {key: value for key, value in more.items() if value}
    more |= {"columns": columns} if columns else {}
    return {"path": path} | more if more else path


def described(draft: Draft, entry: Any) -> Any:
    """Translate a path, or axolotl's and TRL's description of a data set."""
    if not isinstance(entry, dict):
        return entry
    fields = PAIRS if entry.get("field_chosen") else FIELDS
    columns = {ours: entry[theirs] for theirs, ours in fields.items() if entry.get(theirs)}
    columns |= entry.get("message_property_mappings") or {}
    columns = {ours: name for ours, name in columns.items() if ours != name}
    if columns.get("messages") == "conversations":  # ShareGPT, which is recognised
        columns = {}

    kind = entry.get("type")
    if kind == "alpaca":
        draft.put("prompt_format", "plain", "type: alpaca, whose text this is")
    elif kind == "completion":
        draft.put("mask", "all", "type: completion")
    elif isinstance(kind, str) and not kind.startswith(TEMPLATES):
        draft.lost[f"type: {kind}"] = "the layout is recognised, and written with the tokenizer's chat template"
    if (roles := entry.get("roles_to_train")) not in ANSWERS:
        draft.lost[f"roles_to_train: {roles}"] = "the assistant's words are trained"
    path = entry.get("data_files") or entry["path"]
    return source(path, columns, split=entry.get("split"), subset=entry.get("name"))


def numbered(draft: Draft, entry: Any) -> Any:
    """Translate ms-swift's `NAME:SUBSET#NUMBER`."""
    name, _, number = str(entry).partition("#")
    name, _, subset = name.partition(":")
    if number:
        draft.lost[f"{name}#{number}"] = "all records are taken; `repeat: 0.5` takes half of them"
    return source(name, subset=subset)


def registered(draft: Draft, name: Any) -> Any:
    """Translate a name that LLaMA-Factory looks up in dataset_info.json."""
    folder, info = _dataset_info(draft.left.get("dataset_dir", "data"), draft.theirs.folder)
    entry = info.get(name)
    if entry is None:
        draft.lost[f"dataset: {name}"] = "no entry in dataset_info.json; write the file's path into data_path"
        return name
    if entry.get("num_samples"):
        draft.lost[f"{name}.num_samples: {entry['num_samples']}"] = "`repeat` takes a share of the records"

    names = REGISTERED | ({"prompt": "text"} if draft.method == "pt" else {})
    columns = {names.get(field, field): column for field, column in entry.get("columns", {}).items()}
    columns |= {TAGS[tag]: word for tag, word in entry.get("tags", {}).items() if tag in TAGS}
    columns = {field: column for field, column in columns.items() if field != column}
    if file := entry.get("file_name"):
        return source(str(folder / file), columns)
    hub = entry.get("hf_hub_url")
    if not hub:
        draft.lost[f"dataset: {name}"] = "neither a file nor a data set on HuggingFace's hub"
    return source(hub or name, columns, split=entry.get("split"), subset=entry.get("subset"))


def _dataset_info(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Read the list of data sets, by a path from where the command runs or from the config's folders; {} without."""
    places = [base / name / "dataset_info.json" for base in (Path(), folder, *folder.parents)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return folder, {}
    try:
        return file.parent, json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


ENTRIES = {"LLaMA-Factory": registered, "ms-swift": numbered}  # of the other tools `described`

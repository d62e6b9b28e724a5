"""The keys of a config as Markdown: `python -m training.config.reference --write` puts them into docs/configuration.md.

Names, defaults and order are those of the fields, the text is each field's docstring. A mention of another page, such
as docs/data.md#records, becomes a link. The tests compare the page with what this makes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from data.records.sources import Source
from training.config.keys import TrainConfig
from training.config.sections import EveryNth

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->"
HEADER = "| key | default | meaning |\n|---|---|---|\n"
GROUPS = {  # by the first key of each
    "model_path": "Model, data and run",
    "train_micro_batch_size_per_gpu": "Batches and samples",
    "optimizer": "Optimizer and losses",
    "bf16": "Precision, ZeRO and what else is DeepSpeed's",
    "resume": "Checkpoints, restarts and faults",
    "eval_data_path": "Evaluation and curves",
    "model_topo": "Stages and replicas",
    "use_grad_ckpt": "Memory and speed",
    "profile_steps": "Log",
}
ENTRIES = "Entries of data_path"
VALUES = (EveryNth, Source)  # no sections: a form of the value, whose keys its own text tells


def written() -> str:
    """The generated part of the page."""
    parts = []
    for name, field in TrainConfig.model_fields.items():
        if name in GROUPS:
            parts.append(f"\n### {GROUPS[name]}\n\n{HEADER}")
        parts += [_row(*each) for each in _keys(name, field)]
    parts.append(f"\n### {ENTRIES}\n\n{HEADER}")
    parts += [_row(*each) for name, field in Source.model_fields.items() for each in _keys(name, field)]
    return "".join(parts) + "\n"


def _keys(name: str, field: FieldInfo) -> Iterator[tuple[str, FieldInfo]]:
    """A key that has a text, and the keys of the section that it may be."""
    sections = [each for each in _models(field.annotation) if each not in VALUES]
    if field.description or not sections:
        yield name, field
    inner = {key: each for section in sections for key, each in section.model_fields.items()}  # schedules share some
    for key, each in inner.items():
        yield from _keys(f"{name}.{key}", each)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _row(name: str, field: FieldInfo) -> str:
    if not field.description:
        raise ValueError(f"{name}: no docstring")
    text = re.sub(r"docs/([\w-]+)\.md(#[\w-]+)?", _link, " ".join(field.description.split()))
    return f"| `{name}` | {_default(field)} | {text} |\n"


def _link(found: re.Match[str]) -> str:
    page, anchor = found[1], found[2] or ""
    target = anchor if page == PAGE.stem else f"{page}.md{anchor}"
    return f"[{(anchor or page).lstrip('#').replace('-', ' ')}]({target})"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == []:
        return "none"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`".replace('"', "")


def main() -> None:
    parser = argparse.ArgumentParser(description="The keys of a config, as Markdown.")
    parser.add_argument("--write", action="store_true", help=f"put them into {PAGE.name} instead of printing them")
    if not parser.parse_args().write:
        print(written())
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + written() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()

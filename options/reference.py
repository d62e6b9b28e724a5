"""Write the keys of a config as Markdown into docs/configuration.md, and as a JSON schema for editors into configs/.

`python -m options.reference --write` does; without `--write` it prints the Markdown.

Names, defaults and order are those of the fields, the text is each field's docstring. A mention of another page, such
as docs/data.md#records, becomes a link. The Chinese page gets its texts from docs/configuration_CN.yml, which says of
each the digest of the docstring that it translates: where that has changed, nothing is written. The tests compare the
pages and the schema with what this makes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from data.settings import Source
from options import RunConfig
from training.config.foreign_names import OTHERS, TOOLS
from training.config.keys import ALIASES
from training.config.section import sections_in

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
CHINESE = PAGE.with_name("configuration_CN.md")
FROM = PAGE.with_name("coming-from.md")  # the keys of other tools; in both languages too
FROM_CHINESE = FROM.with_name("coming-from_CN.md")
SCHEMA = Path(__file__).parents[1] / "configs" / "pipetune.schema.json"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->"
HEADER = ("key", "default", "meaning")
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
Said = Callable[[str, str], str]  # a key and its docstring, or "" and a word of the page, to what the page says


def written(page: Path = PAGE) -> str:
    """Make the generated part of a page; ValueError without a translation."""
    said: Said = _english
    if page in (CHINESE, FROM_CHINESE):
        said = partial(translated, yaml.safe_load(CHINESE.with_suffix(".yml").read_text(encoding="utf-8")))
    if page in (FROM, FROM_CHINESE):
        return foreign_keys(said)
    header = f"| {' | '.join(said('', word) for word in HEADER)} |\n|---|---|---|\n"
    parts = []
    for name, field in RunConfig.model_fields.items():
        if name in GROUPS:
            parts.append(f"\n### {said('', GROUPS[name])}\n\n{header}")
        parts += [_row(said, *each) for each in _keys(name, field)]
    parts.append(f"\n### {said('', ENTRIES)}\n\n{header}")
    for name, field in Source.model_fields.items():
        parts += [_row(said, *each) for each in _keys(name, field)]
    return "".join(parts) + "\n"


class _Untitled(GenerateJsonSchema):
    """Leave out titles, which only repeat the keys."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def schema() -> str:
    """Make the JSON schema of a config file."""
    made = {"$schema": GenerateJsonSchema.schema_dialect} | RunConfig.model_json_schema(schema_generator=_Untitled)
    for alias, key in ALIASES.items():
        section, _, name = key.rpartition(".")
        inside = f"$defs/{sections_in(RunConfig.model_fields[section].annotation)[0].__name__}/" if section else ""
        made["properties"][alias] = {"$ref": f"#/{inside}properties/{name}"}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def foreign_keys(said: Said) -> str:
    """Make the table of other tools' keys, a column for each tool."""
    header = [said("", "here"), *TOOLS.values(), said("", "note")]
    lines = [header, ["---"] * len(header)]
    for key, advice, names in OTHERS:
        foreign = [name.partition(":") for name in names.split()]
        cells = []
        for letter in TOOLS:
            of_tool = [f"`{name}`" for name, _, tools in foreign if letter in tools]
            cells.append(", ".join(of_tool))
        if any(cells):
            lines.append([f"`{key}`" if key else said("", "none"), *cells, said("", advice) if advice else ""])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def translated(texts: dict[str, dict[str, Any]], name: str, english: str) -> str:
    """Look up the Chinese text of a docstring; ValueError where it is outdated."""
    if not name:
        if english not in texts["words"]:
            raise ValueError(f"words: expected a translation of {english!r} in docs/configuration_CN.yml, found none")
        return str(texts["words"][english])
    found, digest = texts["keys"].get(name, {}), hashlib.sha256(english.encode()).hexdigest()[:8]
    if found.get("english") != digest:
        there = "that of a docstring that has changed" if found else "none"
        raise ValueError(
            f'{name}: expected a translation with english: "{digest}" in docs/configuration_CN.yml, found {there}'
        )
    return str(found["text"])


def _english(name: str, english: str) -> str:
    return re.sub(r"docs/([\w-]+)\.md(#[\w-]+)?", _link, english) if name else english


def _keys(name: str, field: FieldInfo) -> Iterator[tuple[str, FieldInfo]]:
    """Yield a key that has a text, and the keys of its section."""
    sections = [each for each in sections_in(field.annotation) if each is not Source]  # which has its own table
    if field.description or not sections:
        yield name, field
    inner: dict[str, FieldInfo] = {}
    for section in sections:
        inner |= section.model_fields  # schedules share some
    for key, each in inner.items():
        yield from _keys(f"{name}.{key}", each)


def _row(said: Said, name: str, field: FieldInfo) -> str:
    if not field.description:
        raise ValueError(f"{name}: no docstring")
    return f"| `{name}` | {_default(said, field)} | {said(name, ' '.join(field.description.split()))} |\n"


def _link(found: re.Match[str]) -> str:
    page, anchor = found[1], found[2] or ""
    target = anchor if page == PAGE.stem else f"{page}.md{anchor}"
    return f"[{(anchor or page).lstrip('#').replace('-', ' ')}]({target})"


def _default(said: Said, field: FieldInfo) -> str:
    if field.is_required():
        return said("", "required")
    value = field.get_default(call_default_factory=True)
    if value is None or value == []:
        return said("", "none")
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`".replace('"', "")


def main() -> None:
    parser = argparse.ArgumentParser(description="The keys of a config, as Markdown.")
    parser.add_argument("--write", action="store_true", help="write the pages and the schema instead of printing")
    if not parser.parse_args().write:
        print(written())
        return
    try:
        made = {page: written(page) for page in (PAGE, CHINESE, FROM, FROM_CHINESE)}
    except ValueError as error:
        parser.error(str(error))
    for page, keys in made.items():
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(before + BEGIN + keys + END + rest.partition(END)[2], encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")


if __name__ == "__main__":
    main()

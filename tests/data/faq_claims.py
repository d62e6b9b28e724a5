"""What the shipped example records say about the program, extracted and compared with the code.

Each check takes the texts of a record and gives a complaint for every claim of its kind that does not hold: names, keys
and their values, overrides, commands and options, lists of families and the like, records, files.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from typing import Any

import yaml

from data.errors import DataError
from data.records.record import KINDS
from data.records.sources import DATA_SUFFIXES
from models.architectures import FAMILIES
from options import load_config
from tests.conftest import ROOT
from tests.data.helpers import parse_record
from tests.data.program import (
    OPTION,
    config_keys,
    known_files,
    known_names,
    known_options,
    takes,
    understood,
)
from training.errors import ConfigError

Claims = Callable[["Texts"], Iterator[str]]

NUMBERS = dict(zip("two three four five six seven eight nine ten".split(), range(2, 11), strict=True))
NUMBERS |= dict(zip("两三四五六七八九十", range(2, 11), strict=True)) | {"二": 2}
FOLDERS = "models|data|training|configs|docs|tests|benchmarks|quickstart"
PATH = re.compile(rf"(?<![\w/.-])(?:(?:{FOLDERS})/[\w./-]*\w|[\w-]+\.py)\b")
SNAKE = re.compile(r"(?<![\w/.-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w/]|\.(?:py|pt)|-model)")
FILE = re.compile(r"(?<![\w/.-])[\w.-]+\.(?:yml|yaml|jsonl?|pt|png)\b")
VALUE = r"(?:\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\]|[\w.+-]*\w)"
SETTING = re.compile(rf"(?<![\w\"])([a-z_]+(?:\.(?!py\b)[a-z_]+)*): ({VALUE})")
OVERRIDE = re.compile(r"(?<![\w/])(?!key\.sub=value)[a-z_]+(?:\.[a-z_]+)+=[\w.+-]*\w")
COMMAND = re.compile(r"`((?:python|deepspeed) [^`]+)`")
TARGET = re.compile(r"\bmake ([a-z-]+)\b")
WHOLE = "(" + "|".join(NUMBERS) + ")"
PLACEHOLDERS = {"N": "1", "DIR": "folder", "FILE": "configs/quickstart.yml", "NAME": "name", "TEXT": "text"}
FORMAT_WORDS = {"JSON": ".json", "JSONL": ".jsonl", "CSV": ".csv", "TSV": ".tsv", "Parquet": ".parquet"}
FORMAT_WORDS |= {"Arrow": ".arrow", "text": ".txt", "文本": ".txt"}
SPELT_ALIKE = {".ndjson"}  # the same as .jsonl


@dataclasses.dataclass(frozen=True)
class Texts:
    """A record's words.

    Attributes:
        raw: the record.
        whole: all of them, line by line.
        answers: those that are trained.
        made_up: names that the record itself declares, of tools and of their parameters.
    """

    raw: dict[str, Any]
    whole: str
    answers: list[str]
    made_up: frozenset[str]

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Texts:
        answers = [raw[name] for name in ("text", "output") if name in raw]
        actions: list[dict[str, Any]] = []
        for role, content in raw.get("rounds", []):
            if role == "ans-api":
                actions += content["actions"]
                answers += [content["ans"], *(action["inner_thought"] for action in content["actions"])]
            elif role == "ans":
                answers.append(content)
        asked = [raw.get(name) or "" for name in ("instruct", "input", "reference", "api_desc")]
        asked += [content for role, content in raw.get("rounds", []) if role == "ask"]
        names = re.findall(r"\w+", raw.get("api_desc", ""))
        return cls(raw, "\n".join([*asked, *answers]), answers, frozenset(names))


def complaints(records: list[dict[str, Any]]) -> list[str]:
    """Every claim that does not hold, with the record that makes it."""
    found = []
    for number, raw in enumerate(records, start=1):
        texts = Texts.of(raw)
        found += [f"record {number}: {complaint}" for check in CHECKS for complaint in check(texts)]
    return found


def names(texts: Texts) -> Iterator[str]:
    """Words in snake_case are keys, fields, metrics, commands or formats."""
    for text in [*texts.answers, texts.raw.get("reference", "")]:
        for name in SNAKE.findall(text):
            if name not in known_names() | texts.made_up:
                yield f"{name}: no such name"


def settings(texts: Texts) -> Iterator[str]:
    """`key: value` has a key of the config, and a value that it takes."""
    for key, text in SETTING.findall(texts.whole):
        sections = config_keys().get(key.split(".")[0], [])
        if not sections:
            if "_" in key or "." in key:
                yield f"{key}: no key of the config"
            continue
        value = yaml.safe_load(text)
        for part in reversed(key.split(".")[1:]):
            value = {part: value}
        name = key.split(".")[0]
        if not any(takes(section, name, value) for section in sections):
            yield f"{key}: {text}: not taken"


def overrides(texts: Texts) -> Iterator[str]:
    """`key.sub=value` can stand behind a command."""
    for text in texts.answers:
        for word in OVERRIDE.findall(text):
            try:
                load_config(ROOT / "configs/quickstart.yml", [word])
            except ConfigError as error:
                yield str(error)


def commands(texts: Texts) -> Iterator[str]:
    """A command is one that its script understands, and so is its launcher."""
    for text in texts.answers:
        for command in COMMAND.findall(text):
            words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]
            if not understood(words):
                yield f"{command}: not understood"


def options(texts: Texts) -> Iterator[str]:
    """A `--word` is an option of a script or of the launcher."""
    for text in texts.answers:
        for option in OPTION.findall(text):
            if option not in known_options():
                yield f"{option}: no such option"


def lists(texts: Texts) -> Iterator[str]:
    """Where families, record types, scripts or file formats are listed, all are."""
    scripts = {path.name for path in ROOT.glob("*.py")} - {"setup.py"}
    known: dict[str, Collection[str]] = {"(?: model families|个系列)": FAMILIES, "(?: record types|种记录类型)": KINDS}
    for text in texts.answers:
        for what, names in (known | {" doors": scripts}).items():
            if counted := re.search(WHOLE + what, text):
                listed = re.split("[;；]", text)[0]
                if NUMBERS[counted[1]] != len(names) or not all(name in listed for name in names):
                    yield f"{counted[0]}: there are {', '.join(sorted(names))}"
        found = {FORMAT_WORDS[word] for word in re.findall("|".join(sorted(FORMAT_WORDS, key=len)[::-1]), text)}
        if len(found) > 2 or "JSON list" in text or "JSON 列表" in text:
            for suffix in {*DATA_SUFFIXES} - SPELT_ALIKE - found:
                yield f"{suffix}: not among the file formats"


def shown_records(texts: Texts) -> Iterator[str]:
    """A record in an answer is one."""
    for text in texts.answers:
        for shown in re.findall(r"\{\"type\".*\}", text):
            try:
                parse_record(json.loads(shown))
            except (DataError, ValueError) as error:
                yield f"{shown}: {error}"


def files(texts: Texts) -> Iterator[str]:
    """A path exists; a bare name is that of a file that Pipetune reads or writes."""
    for text in [*texts.answers, texts.raw.get("instruct") or ""]:
        for path in PATH.findall(text):
            if not (ROOT / path).exists():
                yield f"{path}: not there"
    for text in texts.answers:
        for name in FILE.findall(text):
            if name not in known_files():
                yield f"{name}: no file that Pipetune writes"
        for target in TARGET.findall(text):
            if f"\n{target}:" not in (ROOT / "Makefile").read_text(encoding="utf-8"):
                yield f"make {target}: no such target"


CHECKS: list[Claims] = [names, settings, overrides, commands, options, lists, shown_records, files]

"""What the shipped example records say about the program, extracted and compared with the code.

Each check takes the texts of a record and gives a complaint for every claim of its kind that does not hold: names, keys
and their values, overrides, commands and options, families, record types, records, file formats, files, doors, sums.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import torch
import yaml
from lion_pytorch import Lion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from data.errors import DataError
from data.records.formats import FORMAT_NAMES
from data.records.record import KINDS
from data.records.sources import DATA_SUFFIXES
from models.architectures import FAMILIES
from tests.conftest import ROOT
from tests.data.helpers import parse_record
from tests.data.program import (
    OPTION,
    config_keys,
    known_files,
    known_names,
    known_options,
    states_of,
    takes,
    understood,
)
from training.config.yaml_file import load_config
from training.errors import ConfigError

Claims = Callable[["Texts"], Iterator[str]]

NUMBERS = dict(zip("two three four five six seven eight nine ten".split(), range(2, 11), strict=True))
NUMBERS |= dict(zip("两三四五六七八九十", range(2, 11), strict=True)) | {"二": 2}
WINGS = "models|data|training|configs|docs|tests|benchmarks|quickstart"
PATH = re.compile(rf"(?<![\w/.-])(?:(?:{WINGS})/[\w./-]*\w|[\w-]+\.py)\b")
SNAKE = re.compile(r"(?<![\w/.-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w/]|\.(?:py|pt)|-model)")
FILE = re.compile(r"(?<![\w/.-])[\w.-]+\.(?:yml|yaml|jsonl?|pt|png)\b")
VALUE = r"(?:\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\]|[\w.+-]*\w)"
SETTING = re.compile(rf"(?<![\w\"])([a-z_]+(?:\.(?!py\b)[a-z_]+)*): ({VALUE})")
OVERRIDE = re.compile(r"(?<![\w/])(?!key\.sub=value)[a-z_]+(?:\.[a-z_]+)+=[\w.+-]*\w")
COMMAND = re.compile(r"`((?:python|deepspeed) [^`]+)`")
TARGET = re.compile(r"\bmake ([a-z-]+)\b")
EQUATION = re.compile(r"([\d(][\d ()*/+-]*) = (\d+)")
DIMS = re.compile(r"dims:? \[(\d+), (\d+)\]|dims [^.。]*?\[(\d+), (\d+)\]")
WHOLE = r"(\d+|" + "|".join(NUMBERS) + ")"
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
    """A command is one that its door understands, and so is its launcher."""
    for text in texts.answers:
        for command in COMMAND.findall(text):
            words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]
            if not understood(words):
                yield f"{command}: not understood"


def options(texts: Texts) -> Iterator[str]:
    """A `--word` is an option of a door or of the launcher."""
    for text in texts.answers:
        for option in OPTION.findall(text):
            if option not in known_options():
                yield f"{option}: no such option"


def families(texts: Texts) -> Iterator[str]:
    """Families that are counted are all that are declared; others are those that are not."""
    for text in texts.answers:
        counted = re.search(WHOLE + r"(?: model families|个系列)", text)
        if not counted:
            continue
        declared, _, derived = re.sub("；", ";", text).partition(";")
        if (found := set(re.findall(r"[a-z0-9]+", declared)) & (FAMILIES.keys() | CONFIG_MAPPING.keys())) != {
            *FAMILIES
        }:
            yield f"families {sorted(found ^ {*FAMILIES})}: not as declared"
        if number(counted[1]) != len(FAMILIES):
            yield f"{counted[0]}: there are {len(FAMILIES)}"
        others = set(re.findall(r"(?:such as|如) ([a-z0-9]+) (?:and|和) ([a-z0-9]+)", derived))
        for name in (each for pair in others for each in pair):
            if name in FAMILIES or name not in CONFIG_MAPPING:
                yield f"{name}: not derived"


def record_types(texts: Texts) -> Iterator[str]:
    """The record types that are counted are all."""
    for text in texts.answers:
        if counted := re.search(WHOLE + r"(?: record types|种记录类型)", text):
            listed = re.findall(r"\b[a-z_]+\b", re.split("[:：]", text)[1].split(";")[0].split("；")[0])
            if set(listed) - {"and"} != {*KINDS} or number(counted[1]) != len(KINDS):
                yield f"{counted[0]}: {listed}, but there are {[*KINDS]}"
            later = re.findall(r"\b[a-z_]+\b", "".join(re.split("[;；]", text)[1:])) if "openai" in text else []
            for name in set(later) & {"openai", "sharegpt", "alpaca", "squad"}:
                if name not in FORMAT_NAMES:
                    yield f"{name}: no such format"


def shown_records(texts: Texts) -> Iterator[str]:
    """A record in an answer is one; one in a question lacks what the answer says that it lacks."""
    for text in texts.answers:
        for shown in re.findall(r"\{\"type\".*\}", text):
            try:
                parse_record(json.loads(shown))
            except (DataError, ValueError) as error:
                yield f"{shown}: {error}"
    given = texts.raw.get("input") or ""
    if given.startswith('{"type"'):
        try:
            parse_record(json.loads(given))
            yield f"{given}: nothing is wrong with it"
        except DataError as error:
            (field,) = re.findall(r"field (\w+): missing", str(error))
            if field not in texts.raw["output"]:
                yield f"{given}: lacks {field}"


def file_formats(texts: Texts) -> Iterator[str]:
    """Where file formats are listed, all are."""
    for text in texts.answers:
        found = {FORMAT_WORDS[word] for word in re.findall("|".join(sorted(FORMAT_WORDS, key=len)[::-1]), text)}
        if len(found) > 2 or "JSON list" in text or "JSON 列表" in text:
            for suffix in {*DATA_SUFFIXES} - SPELT_ALIKE - found:
                yield f"{suffix}: not among the file formats"


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


def doors_and_wings(texts: Texts) -> Iterator[str]:
    """Where doors or wings are listed, all are."""
    there = {path.name for path in ROOT.glob("*.py")} - {"setup.py"}
    for text in texts.answers:
        if "doors" in text:
            told = re.search(WHOLE + " doors", text)
            if set(re.findall(r"\w+\.py", text)) != there or not told or number(told[1]) != len(there):
                yield f"doors: there are {sorted(there)}"
        if told := re.search(WHOLE + r" wings: (.*)", text):
            wings = re.findall(r"(\w+) \(", told[2])
            if number(told[1]) != len(wings) or not all((ROOT / wing / "__init__.py").exists() for wing in wings):
                yield f"wings: {wings}"


def sums(texts: Texts) -> Iterator[str]:
    """Sums are right, of parts and of processes too."""
    for text in texts.answers:
        for left, right in EQUATION.findall(text):
            if value_of(left.strip()) != int(right):
                yield f"{left} = {right}"
    for parts, total in re.findall(r"\[([\d, ]+)\][^\n]{0,40}?[\n\s][^\[]*?(?:sum|sums) to (\d+)", texts.whole):
        if sum(map(int, parts.split(","))) != int(total):
            yield f"parts [{parts}]: the sum is not {total}"
    if found := DIMS.search(texts.whole):
        stages, replicas = (int(each) for each in found.groups() if each)
        expected = {"process": stages * replicas, "replica": replicas, "stage": stages}
        patterns = {
            "process": WHOLE + r"(?: processes| 个进程)",
            "replica": WHOLE + r"(?: replicas|份)",
            "stage": WHOLE + r"(?:-stage| 段)",
        }
        for what, pattern in patterns.items():
            for told in re.findall(pattern, "\n".join(texts.answers)):
                if number(told) != expected[what]:
                    yield f"dims [{stages}, {replicas}]: {told} {what}"


def optimizer_states(texts: Texts) -> Iterator[str]:
    """How much an optimizer keeps of each weight."""
    pattern = r"Lion (?:keeps|只存) ?(\w+?) ?(?:states?|个状态)[^.。]*?(?:AdamW's|AdamW 存) ?(\w+?)\b(?:个)?"
    for text in texts.answers:
        for lion, adamw in re.findall(pattern, text):
            told = [number({"one": "1", "一": "1"}.get(each, each.rstrip("个"))) for each in (lion, adamw)]
            if told != [states_of(Lion), states_of(torch.optim.AdamW)]:
                yield f"{text}: the states of a weight"


CHECKS: list[Claims] = [
    names,
    settings,
    overrides,
    commands,
    options,
    families,
    record_types,
    shown_records,
    file_formats,
    files,
    doors_and_wings,
    sums,
    optimizer_states,
]


def number(word: str) -> int:
    return int(word) if word.isdecimal() else NUMBERS[word]


def value_of(expression: str) -> float:
    """Of numbers, brackets and operators."""
    assert re.fullmatch(r"[\d ()*/+-]+", expression)
    return float(eval(compile(ast.parse(expression, mode="eval"), "faq.json", "eval"), {}))

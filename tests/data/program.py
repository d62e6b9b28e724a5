"""The program's own: names, files, options, commands; for the tests of what is said about it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import sys
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.launcher import runner
from pydantic import BaseModel, ValidationError

import convert_model
from data.records.record import KINDS
from data.settings import CHAT_TEMPLATE, COLUMNS, FORMAT_NAMES
from models.checkpoint.layout import LATEST, MANIFEST, layer_file
from options import RunConfig
from tests.conftest import ROOT
from training.command_line import parse_arguments as of_training
from training.demo.command_line import parse_arguments as of_demo
from training.metrics.reporter import METRICS_FILE
from training.metrics.step_metrics import StepMetrics

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@cache
def config_keys() -> dict[str, list[type[BaseModel]]]:
    """The sections that have a key of this name."""
    found: dict[str, list[type[BaseModel]]] = {}
    waiting: list[type[BaseModel]] = [RunConfig]
    while waiting:
        section = waiting.pop()
        for name, field in section.model_fields.items():
            found.setdefault(name, []).append(section)
            waiting += [kind for kind in kinds_in(field.annotation) if section not in found[name][:-1]]
    return found


def kinds_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from kinds_in(part)


def takes(section: type[BaseModel], name: str, value: Any) -> bool:
    needed = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 1}
    given = (needed if section is RunConfig else {}) | {name: value}
    try:
        section.model_validate(given)
        return True
    except ValidationError:
        return False


@cache
def known_names() -> frozenset[str]:
    of_records = [name for kind in KINDS.values() for name in kind.model_fields]
    parameters = ["total_num_steps", CHAT_TEMPLATE]  # the first is that of DeepSpeed's schedules
    parameters += [each for made in (torch.optim.AdamW, torch.load) for each in inspect.signature(made).parameters]
    of_steps = [field.name for field in dataclasses.fields(StepMetrics)]
    with patch.object(sys, "argv", ["convert_model.py", "--help"]):
        converting = re.findall(r"\w+", printed_by(convert_model.parse_arguments))
    return frozenset(
        [*config_keys(), *KINDS, *of_records, *COLUMNS, *FORMAT_NAMES, *parameters, *of_steps, *converting]
    )


@cache
def known_files() -> frozenset[str]:
    of_configs = [path.name for path in (ROOT / "configs").iterdir()]
    of_models = ["config.json", MANIFEST, layer_file(0), LATEST]
    return frozenset([*of_configs, *of_models, METRICS_FILE, "config.yml"])


@cache
def known_options() -> frozenset[str]:
    parsers: list[tuple[Callable[[], Any], list[str]]] = [(lambda: of_training(RunConfig, ""), []), (of_demo, [])]
    parsers += [(lambda: runner.parse_args(["--help"]), [])]
    parsers += [(convert_model.parse_arguments, [name]) for name in ("hg_to_pp", "pp_to_hg", "download", "check")]
    found: list[str] = []
    for parse, words in parsers:
        with patch.object(sys, "argv", ["script", *words, "--help"]):
            found += OPTION.findall(printed_by(parse))
    return frozenset(found)


def printed_by(parse: Callable[[], Any]) -> str:
    """What a parser that leaves the process prints before."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        parse()
    return out.getvalue()


def understood(words: list[str]) -> bool:
    """Return whether the launcher, where there is one, and the script take these words."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            if words[0] == "deepspeed":
                arguments = runner.parse_args(words[1:])
                words = ["python", arguments.user_script, *arguments.user_args]
            parsers = {"demo": of_demo, "convert_model": convert_model.parse_arguments}
            parse = parsers.get(Path(words[1]).stem, lambda: of_training(RunConfig, ""))
            with patch.object(sys, "argv", words[1:]):
                given = parse()
    except SystemExit:
        return False
    return (ROOT / words[1]).is_file() and Path(getattr(given, "config", ROOT / "Makefile")).suffix in (".yml", "")

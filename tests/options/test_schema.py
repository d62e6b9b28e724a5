"""The JSON schema that editors get takes what the program takes, and refuses wrong keys and types."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from options import RunConfig, load_config
from options.reference import SCHEMA, schema
from pipetune.__main__ import init
from tests.conftest import ROOT
from tests.docs.pages import blocks
from training.config.yaml_file import parse_yaml
from training.errors import ConfigError

REQUIRED = {"model_path": "m", "data_path": "d.json", "save_path": "s", "train_batch_size": 64}
VALIDATOR = Draft202012Validator(json.loads(schema()))
LINE = "# yaml-language-server: $schema="
CONFIGS = [*(ROOT / "configs").glob("*.yml"), *(ROOT / "examples").glob("*/*.yml")]
SNIPPETS = {block.place: block.text for block in blocks("yaml")}

TAKEN = """
bf16: true
fp16: false
bf16: {enabled: true}
n_epochs: 3
n_epoches: 3
parts: auto
parts: [30, 35]
model_topo: {process_topology: {dims: [2, 1]}, parts: auto}
data_path: [a.json, {path: [b.csv, c.csv], repeat: 0.5}]
data_path: {path: b.csv, columns: {prompt: ask}}
eval_data_path: held_out.json
use_grad_ckpt: {every: 2}
use_grad_ckpt: auto
packing: false
scheduler: {type: WSD, params: {decay_ratio: 0.2}}
optimizer: {type: Lion, params: {lr: 1e-5, betas: [0.9, 0.95]}, no_wd_kws: [bias]}
optimizer: {type: Adafactor, params: {lr: 1e-3, eps: [null, 0.001]}}
zero_optimization: {stage: 1, cpu_offload: true, reduce_bucket_size: 5e8}
"""
REFUSED = """
max_seq_length: 128
bf16: maybe
bf16: {enable: true}
n_epochs: many
parts: 3
parts: [3, x]
data_path: 3
data_path: [{file: a.json}]
use_grad_ckpt: {each: 2}
packing: rows
train_batch_size: true
max_steps: 0
scheduler: {type: exponential}
scheduler: {params: {warmup_steps: 3}}
optimizer: {params: {lr: auto}}
optimizer: {params: {betas: [0.9, 1.5]}}
model_topo: {process_topology: {dims: 4}}
zero_optimization: {stage: 4}
preemption_signals: [SIGKILL]
"""


def faults(keys: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(REQUIRED | keys)]


def test_the_file_is_that_of_the_keys() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema(), "expected: python -m options.reference --write"
    Draft202012Validator.check_schema(json.loads(schema()))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_ready_made_config_is_taken(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [error.message for error in VALIDATOR.iter_errors(parse_yaml(text))] == []
    saved = yaml.safe_load(yaml.safe_dump(load_config(path).dump()))  # the run's config.yml
    assert [error.message for error in VALIDATOR.iter_errors(saved)] == []
    if path.parent == SCHEMA.parent:
        first = text.splitlines()[0]
        assert first.startswith(LINE) and path.parent / first.removeprefix(LINE) == SCHEMA


@pytest.mark.parametrize("text", [*TAKEN.strip().splitlines(), *SNIPPETS.values()], ids=str)
def test_each_form_of_a_key_is_taken(text: str) -> None:
    assert faults(parse_yaml(text)) == []


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_wrong_keys_and_types_are_refused(line: str, tmp_path: Path) -> None:
    keys = parse_yaml(line)
    assert len(faults(keys)) == 1
    (tmp_path / "run.yml").write_text(yaml.safe_dump(REQUIRED | keys))
    with pytest.raises(ConfigError):
        load_config(tmp_path / "run.yml")


def test_descriptions_are_the_docstrings_of_keys() -> None:
    properties = json.loads(schema())["properties"]
    described = {name: field.description for name, field in RunConfig.model_fields.items() if field.description}
    assert {name: properties[name]["description"] for name in described} == described
    assert len(described) > 40


@pytest.mark.parametrize("words", [[], ["--zero"]])
def test_a_config_that_init_writes_finds_the_schema(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipetune", str(tmp_path / "run.yml"), *words])
    init()
    first = (tmp_path / "run.yml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(LINE) and Path(first.removeprefix(LINE)) == SCHEMA

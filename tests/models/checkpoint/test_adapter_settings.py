"""What adapter_config.json says: what is known is read, and all else is refused in a line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from models.checkpoint.adapter_settings import ANY, AdapterSettings, read_settings
from models.checkpoint.layout import ADAPTER
from models.errors import CheckpointError

ENOUGH: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "base"}


def settings(folder: Path, **changes: Any) -> AdapterSettings:
    (folder / ADAPTER).write_text(json.dumps(ENOUGH | changes))
    return read_settings(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "gaussian", "lora_dropout": 0.5, "use_rslora": True},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}, "lora_alpha": 2.5},
        {"init_lora_weights": False, "target_modules": r".*\.(q|v)_proj", "modules_to_save": []},
        {"auto_mapping": {"unsloth_fixed": True}, "revision": "main", "peft_version": "0.99", "inference_mode": True},
        {"something_of_tomorrow": None, "another": {}, "third": False},
        {"target_modules": None, "target_parameters": ["experts.down_proj"]},
    ],
)
def test_what_peft_makes_of_plain_lora_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    changes = json.loads((tmp_path / ADAPTER).read_text()) | changes
    assert settings(tmp_path, **changes).r == 4


def test_every_setting_of_peft_is_known_or_changes_nothing_as_it_is() -> None:
    usual = LoraConfig().to_dict()
    unknown = usual.keys() - AdapterSettings.model_fields.keys() - ANY
    assert {name: usual[name] for name in unknown if usual[name]} == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"init_lora_weights": "pissa"}, ["init_lora_weights: 'pissa'", "base as it is"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights"]),
        ({"init_lora_weights": "olora"}, ["init_lora_weights"]),
        ({"init_lora_weights": "loftq"}, ["init_lora_weights"]),
        ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens: [1, 2]", "plain LoRA"]),
        ({"layer_replication": [[0, 2], [1, 3]]}, ["layer_replication"]),
        ({"layers_to_transform": 0}, ["layers_to_transform: 0", "plain LoRA"]),
        ({"use_dora": True}, ["use_dora: True"]),
        ({"some_future_kind": True}, ["some_future_kind: True"]),
        ({"bias": "all"}, ["bias: 'all'", "none"]),
        ({"peft_type": "IA3"}, ["peft_type: 'IA3'", "LORA"]),
        ({"r": -4}, ["r: -4", "whole number above 0"]),
        ({"r": "4"}, ["r: '4'"]),
        ({"r": 4.5}, ["r: 4.5"]),
        ({"r": True}, ["r: True"]),
        ({"r": None}, ["r: missing"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha: nan", "number above 0"]),
        ({"lora_alpha": float("inf")}, ["lora_alpha: inf"]),
        ({"lora_alpha": "8"}, ["lora_alpha: '8'"]),
        ({"lora_alpha": [8]}, ["lora_alpha: [8]"]),
        ({"lora_dropout": "x"}, ["lora_dropout: 'x'", "0 to 1"]),
        ({"lora_dropout": 1.5}, ["lora_dropout: 1.5"]),
        ({"use_rslora": "yes"}, ["use_rslora: 'yes'"]),
        ({"target_modules": {"q_proj": 1}}, ["target_modules", "names"]),
        ({"target_modules": ["q_proj", 3]}, ["target_modules"]),
        ({"modules_to_save": "lm_head"}, ["modules_to_save: 'lm_head'"]),
        ({"base_model_name_or_path": 5}, ["base_model_name_or_path: 5"]),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        settings(tmp_path, **changes)
    line = str(refused.value)
    assert line.startswith(f"{tmp_path / ADAPTER}: ") and "expected" in line and "\n" not in line
    assert all(word in line for word in words), line

"""Values of config.json that make no sense are refused in a line that names the key; stop ids are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.api import read_spec
from models.checkpoint.layout import layout_of
from models.checkpoint.source import HuggingFaceSource
from models.config_json import model_fields, stop_ids
from tests.conftest import TINY
from tests.models.helpers import error_line


def write(tmp_path: Path, **stated: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"} | stated))
    return path


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_hidden_layers", -1, "num_hidden_layers: expected at least 1, found -1"),
        ("hidden_size", 0, "hidden_size: expected at least 1, found 0"),
        ("num_local_experts", 10**9, "num_local_experts: expected at most 10,000, found 1000000000"),
        ("head_dim", 10**9, "head_dim: expected at most 65,536, found 1000000000"),
        ("max_position_embeddings", 10**30, "max_position_embeddings: expected at most 1,099,511,627,776"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps: expected a number above 0, found nan"),
        ("rope_theta", float("inf"), "rope_theta: expected a number above 0, found inf"),
        ("rope_theta", "10000", "rope_theta: expected a number above 0, found '10000'"),
        ("num_attention_heads", 2.5, "'num_attention_heads' expected int, got float"),
        ("vocab_size", "512", "'vocab_size' expected int, got str"),
        ("torch_dtype", "float99", "float99"),
    ],
)
def test_what_no_model_has_is_refused_in_one_line(tmp_path: Path, name: str, value: Any, told: str) -> None:
    path = write(tmp_path, **TINY | {name: value})
    line = error_line(lambda: read_spec(tmp_path))
    assert str(path) in line and told in line


def test_a_file_far_too_large_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("w") as file:
        file.truncate(2**40)  # a hole, which takes no room
    assert "larger than 17 MB" in error_line(lambda: read_spec(tmp_path))


@pytest.mark.parametrize(
    ("stated", "read"), [("auto", None), (None, None), ("torch.bfloat16", "bfloat16"), ("float32", "float32")]
)
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtypes_that_transformers_loads(tmp_path: Path, name: str, stated: Any, read: Any) -> None:
    assert model_fields(write(tmp_path, **{name: stated}))[1].get(name) == read


def test_folders_of_the_hubs_cache_and_links_to_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "0123abc").mkdir(parents=True)
    assert "snapshots/0123abc" in error_line(lambda: layout_of(tmp_path))
    write(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("../../blobs/gone")
    assert "model.safetensors: a link to ../../blobs/gone" in error_line(lambda: layout_of(tmp_path))


def test_an_index_may_list_computed_buffers_that_no_shard_has(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model-00001.safetensors")
    where = dict.fromkeys(
        ["model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"], "./model-00001.safetensors"
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    source = HuggingFaceSource.__new__(HuggingFaceSource)  # what it lists needs no whole model
    source.folder, source._open = tmp_path, {}
    assert source._list_files() == {"model-00001.safetensors": ["model.norm.weight"]}


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, None, {5, 6}),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, {5}),
        ({"eos_token_id": 0}, None, {0}),
        ({"eos_token_id": None}, None, set()),
        ({}, None, set()),
        (None, {"eos_token_id": [7, 8]}, {7, 8}),
        (None, None, set()),
    ],
)
def test_stop_ids_are_those_of_generation_config_else_of_the_config(
    generation_config: Any, config: Any, expected: set[int], tmp_path: Path
) -> None:
    for name, fields in (("generation_config", generation_config), ("config", config)):
        if fields is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    assert stop_ids(tmp_path) == expected

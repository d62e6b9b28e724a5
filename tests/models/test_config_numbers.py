"""A config.json whose values make no sense is refused in a line that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.checkpoint.layout import layout_of
from models.checkpoint.source import HuggingFaceSource
from models.config_json import model_fields
from models.errors import CheckpointError


def fields_of(tmp_path: Path, **stated: Any) -> dict[str, Any]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"} | stated))
    return model_fields(path)[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", -1),
        ("hidden_size", 0),
        ("num_attention_heads", 2.5),
        ("num_key_value_heads", -2),
        ("vocab_size", "512"),
        ("head_dim", True),
        ("max_position_embeddings", 10**30),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "10000"),
        ("rope_theta", float("inf")),
        ("torch_dtype", "float99"),
        ("dtype", ["bfloat16"]),
    ],
)
def test_the_key_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {name}: expected "):
        fields_of(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("stated", "read"), [("auto", None), (None, None), ("torch.bfloat16", "bfloat16"), ("float32", "float32")]
)
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtypes_that_transformers_loads(tmp_path: Path, name: str, stated: Any, read: Any) -> None:
    assert fields_of(tmp_path, **{name: stated}).get(name) == read


def test_a_weight_file_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    fields_of(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a link to \.\./\.\./blobs/gone"):
        layout_of(tmp_path)


def test_a_folder_of_the_hubs_cache_names_its_models(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "0123abc").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"snapshots/0123abc"):
        layout_of(tmp_path)


def test_an_index_may_list_computed_buffers_that_no_shard_has(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model-00001.safetensors")
    where = dict.fromkeys(
        ["model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"], "./model-00001.safetensors"
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    source = HuggingFaceSource.__new__(HuggingFaceSource)  # what it lists needs no whole model
    source.folder, source._open = tmp_path, {}
    assert source._list_files() == {"model-00001.safetensors": ["model.norm.weight"]}

"""A checkpoint that cannot be used is refused in one line that names the file, from either layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import load_model
from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from tests.models.command_line import refusal
from tests.models.derived.cases import write_small
from tests.models.helpers import (
    SAFETENSORS_INDEX,
    change_config,
    change_weights,
    copy_of,
    error_line,
    joined,
    read_weights,
    run_convert_model,
    write_weights,
)

SHARD, LAYER = "model-00002-of-00005.safetensors", "layer_01-model_states.pt"
QUERY = "model.layers.1.self_attn.q_proj.weight"
COMMANDS = {"huggingface": "hg_to_pp", "pipeline": "pp_to_hg"}  # by the layout that they read
NOT_FETCHED = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"

Damage = Callable[[Path], object]
Bad = tuple[Damage, tuple[str, ...]]  # what is done to the folder, and parts of the error


def text(file: str, content: str) -> Damage:
    return lambda folder: (folder / file).write_text(content)


def halve(file: str) -> Damage:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size // 2)


def overwrite(file: str, data: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(data + (folder / file).read_bytes()[len(data) :])


def unlink(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def config(**changes: object) -> Damage:
    return lambda folder: change_config(folder, **changes)


def weights(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    return lambda folder: change_weights(folder, change)


def without(name: str) -> Damage:
    return weights(lambda tensors: tensors.pop(name, None))


def layer(number: int, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / f"layer_{number:02d}-model_states.pt"
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return damage


def note_in_bin(folder: Path) -> None:
    """Store the weights as one pytorch_model.bin that holds a text too."""
    write_weights(folder, {"pytorch_model.bin": joined(read_weights(folder)) | {"note": "hello"}})  # type: ignore[dict-item]


def rope(kind: str) -> Damage:
    return config(rope_parameters={"rope_type": kind, "rope_theta": 1e4})


HUGGINGFACE: dict[str, Bad] = {
    "no-config": (unlink("config.json"), ("config.json",)),
    "config-not-json": (text("config.json", '{\n  "model_type": llama\n}'), ("config.json", "line 2", "column 17")),
    "config-a-list": (text("config.json", "[1]"), ("config.json", "object")),
    "no-model-type": (text("config.json", '{"hidden_size": 64}'), ("config.json", "model_type")),
    "unknown-model-type": (config(model_type="gpt9"), ("config.json", "gpt9", "llama")),
    "unknown-activation": (config(hidden_act="gleam"), ("config.json: hidden_act: transformers knows no 'gleam'",)),
    "unknown-rope": (rope("gleam"), ("config.json: rope_parameters.rope_type: transformers knows no 'gleam'",)),
    "no-heads": (
        config(model_type="mamba", num_attention_heads=None),
        ("config.json: mamba has no num_attention_heads; expected a decoder with attention",),
    ),
    "nested-deeply": (text("config.json", "[" * 10**5), ("config.json", "recursion")),
    "digits-without-end": (text("config.json", '{"num_hidden_layers": ' + "9" * 5000 + "}"), ("config.json",)),
    "layers-without-end": (config(num_hidden_layers=10**9), ("config.json", "num_hidden_layers", "10,000")),
    "no-weights": (lambda folder: write_weights(folder, {}), ("safetensors",)),
    "truncated": (halve(SHARD), (SHARD,)),
    "header-too-long": (overwrite(SHARD, b"\xff" * 8), (SHARD,)),
    "not-fetched": (text(SHARD, NOT_FETCHED), (SHARD,)),
    "missing-shard": (unlink(SHARD), (SHARD,)),
    "index-without-map": (text(SAFETENSORS_INDEX, "{}"), (SAFETENSORS_INDEX, "weight_map")),
    "wrong-shape": (config(intermediate_size=95), ("gate_proj.weight", "[96, 64]", "[95, 64]", "config.json")),
    "missing-weight": (without(QUERY), (QUERY,)),
    "missing-head": (without("lm_head.weight"), ("missing weights: lm_head.weight; ", "tie_word_embeddings: true")),
    "a-block-too-many": (config(num_hidden_layers=1), ("unexpected", "layers.1.input_layernorm.weight", " and 4 more")),
    "a-block-too-few": (config(num_hidden_layers=3), ("missing", "layers.2.input_layernorm.weight", " and 4 more")),
    "unexpected-weight": (weights(lambda t: t.update({f"{QUERY}_scale": torch.ones(1)})), ("q_proj.weight_scale",)),
    "tied-but-with-another-head": (config(tie_word_embeddings=True), ("lm_head.weight", "tie_word_embeddings")),
    "bin-with-a-text": (note_in_bin, ("pytorch_model.bin", "tensors")),
}
PIPELINE: dict[str, Bad] = {
    "missing-layer": (unlink(LAYER), (LAYER,)),
    "truncated": (halve(LAYER), (LAYER,)),
    "garbage": (overwrite(LAYER, b"\xff" * 300), (LAYER,)),
    "not-fetched": (text(LAYER, NOT_FETCHED), (LAYER,)),
    "wrong-shape": (config(intermediate_size=95), ("layer_01", "gate_proj.weight", "[96, 64]", "[95, 64]")),
    "missing-weight": (layer(3, lambda s: s.pop("norm.weight")), ("layer_03", "norm.weight")),
    "unexpected-weight": (layer(2, lambda s: s.update(bias=torch.ones(1))), ("layer_02", "bias")),
    "no-tensor": (layer(2, lambda s: s.update(note="hello")), ("layer_02", "tensors")),
    "a-block-too-many": (config(num_hidden_layers=1), ()),
    "a-block-too-few": (config(num_hidden_layers=3), ()),
}
DAMAGES = [("huggingface", name) for name in HUGGINGFACE] + [("pipeline", name) for name in PIPELINE]


def assert_refused(folder: Path, command: str, parts: tuple[str, ...]) -> None:
    """Loading and converting a folder end in one line with these parts, and leave nothing behind."""
    before = set(folder.parent.iterdir())
    for line in (error_line(lambda: load_model(folder)), refusal(command, folder, folder.with_name("out"))):
        assert str(folder) in line
        assert [part for part in parts if part not in line] == [], line
    assert set(folder.parent.iterdir()) == before


@pytest.mark.parametrize(("layout", "name"), DAMAGES, ids=[f"{layout}-{name}" for layout, name in DAMAGES])
def test_damage_is_named_in_one_line(both_layouts: dict[str, Path], layout: str, name: str, tmp_path: Path) -> None:
    damage, parts = (HUGGINGFACE if layout == "huggingface" else PIPELINE)[name]
    folder = copy_of(both_layouts[layout], tmp_path / "bad")
    damage(folder)
    assert_refused(folder, COMMANDS[layout], parts)


def test_weights_of_another_class_are_named(tmp_path: Path) -> None:
    write_small(tmp_path / "gemma", "gemma2")
    change_config(tmp_path / "gemma", model_type="llama")
    parts = ("unexpected weights for llama: model.layers.0.post_feedforward_layernorm.weight",)
    assert_refused(tmp_path / "gemma", "hg_to_pp", parts)


W_PACK, EXPERT = "model.layers.1.self_attn.W_pack.weight", "model.layers.1.block_sparse_moe.experts.2.w3.weight"
FUSED_KEYS = "transformer.encoder.layers.0.self_attention.query_key_value.weight"


def fewer_rows(name: str) -> Damage:
    return weights(lambda tensors: tensors.update({name: tensors[name][:-1]}) if name in tensors else None)


FUSED: dict[str, tuple[str, Damage, tuple[str, ...]]] = {  # one tensor in memory, several on disk, or the reverse
    "pack-of-fewer-rows": ("baichuan2-7b", fewer_rows(W_PACK), (W_PACK, "[191, 64]", "[192, 64]", "config.json")),
    "expert-missing": ("mixtral", without(EXPERT), ("missing", EXPERT)),
    "experts-too-few": ("mixtral", config(num_local_experts=5), ("missing", "experts.4.w1.weight", " and 4 more")),
    "other-groups": ("chatglm3", config(multi_query_group_num=1), (FUSED_KEYS, "[128, 64]", "[96, 64]")),
}


@pytest.mark.parametrize("name", FUSED)
def test_damage_of_fused_weights_is_named_in_one_line(
    name: str, make_case: Callable[..., Path], tmp_path: Path
) -> None:
    case, damage, parts = FUSED[name]
    folder = make_case(case, {"max_shard_size": "50KB"})
    layers = tmp_path / "layers"
    hg_to_pp(folder, layers)
    damage(folder)
    assert_refused(folder, "hg_to_pp", parts)
    if name in ("experts-too-few", "other-groups"):  # damage of config.json
        damage(layers)
        assert_refused(layers, "pp_to_hg", ("config.json",))


def test_a_folder_of_the_wrong_kind_is_refused(both_layouts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for path, what in ((tmp_path / "nowhere", "not found"), (tmp_path / "file", "a file")):
        assert f"{path}: {what}; expected a model folder" in error_line(partial(load_model, path))
    assert "already in the pipeline layout" in error_line(lambda: hg_to_pp(both_layouts["pipeline"], tmp_path / "out"))
    assert "not in the pipeline layout" in error_line(lambda: pp_to_hg(both_layouts["huggingface"], tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_command_line_prints_one_line_and_exits_with_2(both_layouts: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(both_layouts["huggingface"], tmp_path / "bad")
    unlink(SHARD)(folder)
    done = run_convert_model("hg_to_pp", "--input-path", folder, "--save-path", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and str(folder / SHARD) in line

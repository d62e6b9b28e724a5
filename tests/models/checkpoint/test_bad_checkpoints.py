"""Shows that a checkpoint that cannot be used is told in one line that names the file, from either layout."""

from __future__ import annotations

import json
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
from tests.models.cases import CASES
from tests.models.command_line import refusal
from tests.models.helpers import (
    SAFETENSORS_INDEX,
    change_config,
    change_weights,
    copy_of,
    error_line,
    joined,
    read_config,
    read_weights,
    run_convert_model,
    write_weights,
)

SHARD = "model-00002-of-00005.safetensors"
QUERY = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
COMMANDS = {"huggingface": "hg_to_pp", "pipeline": "pp_to_hg"}  # by what they read
NOT_CODE = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"

Damage = Callable[[Path], object]
Bad = tuple[Damage, tuple[str, ...]]  # what is done to the folder, and what the line must say


def text(file: str, content: str) -> Damage:
    return lambda folder: (folder / file).write_text(content)


def pipe(file: str) -> Damage:
    """Put a pipe in a file's place, which nobody writes into."""

    def damage(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return damage


def cut(file: str, share: float) -> Damage:
    """Leave a share of a file, or all but a number of bytes."""

    def damage(folder: Path) -> None:
        size = (folder / file).stat().st_size
        os.truncate(folder / file, size + int(share) if share < 0 else int(size * share))

    return damage


def overwritten(file: str, place: int, data: bytes) -> Damage:
    def damage(folder: Path) -> None:
        whole = bytearray((folder / file).read_bytes())
        whole[place : place + len(data)] = data
        (folder / file).write_bytes(whole)

    return damage


def unlink(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def config(**changes: object) -> Damage:
    return lambda folder: change_config(folder, **changes)


def weights(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    return lambda folder: change_weights(folder, change)


def without(name: str) -> Damage:
    return weights(lambda tensors: tensors.pop(name, None))


def rows(name: str, count: int) -> Damage:
    """Give a weight fewer rows than it has."""
    return weights(lambda tensors: tensors.update({name: tensors[name][:count]}) if name in tensors else None)


def without_field(name: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(
        json.dumps({field: value for field, value in read_config(folder).items() if field != name})
    )


def layer(number: int, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / f"layer_{number:02d}-model_states.pt"
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return damage


def as_one_bin(state: dict[Any, Any]) -> Damage:
    """One pytorch_model.bin that holds the given things besides the weights."""

    def damage(folder: Path) -> None:
        write_weights(folder, {"pytorch_model.bin": joined(read_weights(folder)) | state})

    return damage


COMMON: dict[str, Bad] = {
    "no-config": (unlink("config.json"), ("config.json",)),
    "config-not-json": (text("config.json", '{\n  "model_type": llama\n}'), ("config.json", "line 2", "column 17")),
    "config-a-list": (text("config.json", "[1]"), ("config.json", "object")),
    "no-model-type": (text("config.json", '{"hidden_size": 64}'), ("config.json", "model_type")),
    "unknown-model-type": (config(model_type="gpt9"), ("config.json", "gpt9", "llama")),
    "field-of-wrong-type": (config(hidden_size="wide"), ("config.json", "hidden_size")),
    "unknown-activation": (config(hidden_act="gleam"), ("config.json: hidden_act: transformers knows no 'gleam'",)),
    "unknown-rope": (
        config(rope_parameters={"rope_type": "gleam", "rope_theta": 1e4}),
        ("config.json: rope_parameters.rope_type: transformers knows no 'gleam'",),
    ),
    "no-heads": (
        config(model_type="mamba", num_attention_heads=None),
        ("config.json: mamba has no num_attention_heads; expected a decoder with attention",),
    ),
    "nested-deeply": (text("config.json", "[" * 10**5), ("config.json", "nested too deeply")),
    "number-of-thousands-of-digits": (
        text("config.json", '{"num_hidden_layers": ' + "9" * 5000 + "}"),
        ("config.json",),
    ),
    "layers-without-end": (config(num_hidden_layers=10**9), ("config.json", "num_hidden_layers", "10,000")),
    "layers-as-a-fraction": (config(num_hidden_layers=1e30), ("config.json", "num_hidden_layers", "10,000")),
    "no-layers": (config(num_hidden_layers=0), ("config.json", "num_hidden_layers", "at least 1")),
    "experts-without-end": (config(num_local_experts=10**9), ("config.json", "num_local_experts", "10,000")),
    "heads-without-end": (config(head_dim=10**9), ("config.json", "head_dim", "65,536")),
    "a-pipe": (pipe("config.json"), ("config.json",)),
    "negative-size": (config(vocab_size=-5), ("config.json",)),
}
HUGGINGFACE: dict[str, Bad] = COMMON | {
    "no-weights": (lambda folder: write_weights(folder, {}), ("safetensors",)),
    "truncated": (cut(SHARD, 0.5), (SHARD,)),
    "one-byte-short": (cut(SHARD, -1), (SHARD,)),
    "empty": (cut(SHARD, 0), (SHARD,)),
    "header-too-long": (overwritten(SHARD, 0, b"\xff" * 8), (SHARD,)),
    "header-too-short": (overwritten(SHARD, 0, b"\x09"), (SHARD,)),
    "header-garbage": (overwritten(SHARD, 8, b"\x80" * 40), (SHARD,)),
    "header-of-no-tensors": (overwritten(SHARD, 0, (2).to_bytes(8, "little") + b"[]"), (SHARD,)),
    "not-fetched": (text(SHARD, NOT_CODE), (SHARD,)),
    "missing-shard": (unlink(SHARD), (SHARD,)),
    "index-not-json": (text(SAFETENSORS_INDEX, "{"), (SAFETENSORS_INDEX,)),
    "index-without-map": (text(SAFETENSORS_INDEX, "{}"), (SAFETENSORS_INDEX, "weight_map")),
    "wrong-shape": (config(intermediate_size=95), ("gate_proj.weight", "[96, 64]", "[95, 64]", "config.json")),
    "missing-weight": (without(QUERY), (QUERY,)),
    "missing-embedding": (without(EMBEDDING), (EMBEDDING,)),
    "missing-norm": (without("model.norm.weight"), ("model.norm.weight",)),
    "missing-head": (without("lm_head.weight"), ("missing weights: lm_head.weight; ", "tie_word_embeddings: true")),
    "a-block-too-many": (config(num_hidden_layers=1), ("unexpected", "layers.1.input_layernorm.weight", " and 4 more")),
    "a-block-too-few": (config(num_hidden_layers=3), ("missing", "layers.2.input_layernorm.weight", " and 4 more")),
    "unexpected-weight": (weights(lambda t: t.update({f"{QUERY}_scale": torch.ones(1)})), ("q_proj.weight_scale",)),
    "tied-but-with-another-head": (config(tie_word_embeddings=True), ("lm_head.weight", "tie_word_embeddings")),
    "bin-no-tensor": (as_one_bin({"note": "hello"}), ("pytorch_model.bin", "tensors")),
    "bin-number-key": (as_one_bin({7: torch.ones(1)}), ("pytorch_model.bin",)),
}
PIPELINE: dict[str, Bad] = COMMON | {
    "missing-layer": (unlink("layer_02-model_states.pt"), ("layer_02-model_states.pt",)),
    "missing-first-layer": (unlink("layer_00-model_states.pt"), ("layer_00-model_states.pt",)),
    "truncated": (cut("layer_01-model_states.pt", 0.5), ("layer_01-model_states.pt",)),
    "one-byte-short": (cut("layer_01-model_states.pt", -1), ("layer_01-model_states.pt",)),
    "empty": (cut("layer_01-model_states.pt", 0), ("layer_01-model_states.pt",)),
    "garbage": (overwritten("layer_01-model_states.pt", 0, b"\xff" * 300), ("layer_01-model_states.pt",)),
    "not-fetched": (text("layer_01-model_states.pt", NOT_CODE), ("layer_01-model_states.pt",)),
    "not-weights": (text("layer_01-model_states.pt", "hello"), ("layer_01-model_states.pt",)),
    "wrong-shape": (config(intermediate_size=95), ("layer_01", "gate_proj.weight", "[96, 64]", "[95, 64]")),
    "missing-weight": (layer(3, lambda s: s.pop("norm.weight")), ("layer_03", "norm.weight")),
    "empty-first-layer": (layer(0, lambda s: s.clear()), ("layer_00", "embed_tokens.weight")),
    "unexpected-weight": (layer(2, lambda s: s.update(bias=torch.ones(1))), ("layer_02", "bias")),
    "no-tensor": (layer(2, lambda s: s.update(note="hello")), ("layer_02", "tensors")),
    "a-block-too-many": (config(num_hidden_layers=1), ()),
    "a-block-too-few": (config(num_hidden_layers=3), ()),
}
DAMAGES = [("huggingface", name) for name in HUGGINGFACE] + [("pipeline", name) for name in PIPELINE]


def assert_told(folder: Path, command: str, wanted: tuple[str, ...]) -> None:
    """Loading and converting a folder are refused in one line that says what is wanted, and leave nothing behind."""
    before = set(folder.parent.iterdir())
    for told in (error_line(lambda: load_model(folder)), refusal(command, folder, folder.with_name("out"))):
        assert str(folder) in told
        assert [fragment for fragment in wanted if fragment not in told] == [], told
    assert set(folder.parent.iterdir()) == before


@pytest.mark.parametrize(("layout", "name"), DAMAGES, ids=[f"{layout}-{name}" for layout, name in DAMAGES])
def test_damage_is_told_in_one_line(both_layouts: dict[str, Path], layout: str, name: str, tmp_path: Path) -> None:
    damage, wanted = (HUGGINGFACE if layout == "huggingface" else PIPELINE)[name]
    folder = copy_of(both_layouts[layout], tmp_path / "bad")
    damage(folder)
    assert_told(folder, COMMANDS[layout], wanted)


W_PACK, EXPERT = "model.layers.1.self_attn.W_pack.weight", "model.layers.1.block_sparse_moe.experts.2.w3.weight"
FUSED_KEYS = "transformer.encoder.layers.0.self_attention.query_key_value"
FAMILIES: dict[str, tuple[str, Damage, tuple[str, ...]]] = {  # of weights that are one tensor here and several there
    "pack-of-other-rows": ("baichuan2-7b", rows(W_PACK, 191), (W_PACK, "[191, 64]", "[192, 64]", "config.json")),
    "expert-of-other-rows": ("mixtral", rows(EXPERT, 95), (EXPERT, "[95, 64]", "[96, 64]", "config.json")),
    "expert-missing": ("mixtral", without(EXPERT), ("missing", EXPERT)),
    "experts-too-few": ("mixtral", config(num_local_experts=5), ("missing", "experts.4.w1.weight", " and 4 more")),
    "experts-too-many": ("mixtral", config(num_local_experts=3), ("unexpected", "experts.3.w1.weight", " and 4 more")),
    "bias-missing": ("chatglm3", without(f"{FUSED_KEYS}.bias"), ("missing", f"{FUSED_KEYS}.bias")),
    "other-groups": ("chatglm3", config(multi_query_group_num=1), (f"{FUSED_KEYS}.weight", "[128, 64]", "[96, 64]")),
    "no-field": ("chatglm3", without_field("ffn_hidden_size"), ("config.json", "ffn_hidden_size")),
}
IN_LAYERS_TOO = {"experts-too-few", "experts-too-many", "other-groups", "no-field"}


@pytest.mark.parametrize("name", FAMILIES)
def test_damage_of_fused_weights_is_told_in_one_line(
    name: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    case, damage, wanted = FAMILIES[name]
    folder = make_checkpoint(CASES[case].model_type, {"max_shard_size": "50KB"}, **CASES[case].changes)
    layers = tmp_path / "layers"
    hg_to_pp(folder, layers)
    damage(folder)
    assert_told(folder, "hg_to_pp", wanted)
    if name in IN_LAYERS_TOO:
        damage(layers)
        assert_told(layers, "pp_to_hg", ("config.json",))


READERS: list[Callable[[Path], object]] = [
    load_model,
    lambda path: hg_to_pp(path, path.with_name("out")),
    lambda path: pp_to_hg(path, path.with_name("out")),
]


@pytest.mark.parametrize("use", READERS)
def test_folder_that_is_not_there_is_told(use: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for name, what in (("nowhere", "not found"), ("file", "a file")):
        assert f"{tmp_path / name}: {what}; expected a model folder" in error_line(partial(use, tmp_path / name))


def test_each_converter_refuses_the_other_layout(both_layouts: dict[str, Path], tmp_path: Path) -> None:
    assert "already in the pipeline layout" in error_line(lambda: hg_to_pp(both_layouts["pipeline"], tmp_path / "out"))
    assert "not in the pipeline layout" in error_line(lambda: pp_to_hg(both_layouts["huggingface"], tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_command_line_says_one_line_and_leaves_with_2(both_layouts: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(both_layouts["huggingface"], tmp_path / "bad")
    unlink(SHARD)(folder)
    done = run_convert_model("hg_to_pp", "--input-path", folder, "--save-path", tmp_path / "out")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert str(folder / SHARD) in lines[0]
    assert done.stdout == ""

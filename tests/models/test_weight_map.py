"""Every family's naming table reads in both directions, for any depth and number of experts, and keeps every bit."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.api import read_spec
from models.architectures import FAMILIES
from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT, Family
from models.spec import ModelSpec
from models.weight_map import Binding, WeightMap, reshape_rows
from tests.conftest import ORIGINALS, TINY

MOST = 130  # blocks or experts


class Table(NamedTuple):
    """An architecture of any depth and number of experts."""

    model_type: str
    changes: dict[str, Any]
    dense: frozenset[int] = frozenset()  # blocks without experts


DENSE = [0, 2, 3]
GATE_UP, DOWN = "block.mlp.experts.gate_up_proj", "block.mlp.experts.down_proj"
DERIVED = ["gemma3_text", "glm4", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"]
TABLES = {model_type: Table(model_type, {}) for model_type in (*FAMILIES, *DERIVED)} | {
    "baichuan-7b": Table("baichuan", {"max_position_embeddings": 256}),
    "qwen3_moe-some-dense": Table("qwen3_moe", {"mlp_only_layers": DENSE}, frozenset(DENSE)),
}
ROUTED = [name for name, table in TABLES.items() if "mix" in table.model_type or "moe" in table.model_type]
names = st.sampled_from(sorted(TABLES))
depths = st.integers(1, MOST)
misspelt = st.sampled_from(["00", "01", "+1", "-1", " 1", "1 ", "", "x", "1_0", "١", "１", "²"])
numbers = misspelt | st.integers(0, 2 * MOST).map(str)


@cache
def spec_of(name: str) -> ModelSpec:
    """The architecture with 5 blocks and 3 experts, of which only the names and shapes matter here."""
    model_type, changes, _ = TABLES[name]
    fields = TINY | {"model_type": model_type, "num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
    fields |= {"moe_intermediate_size": 32}
    if model_type in ORIGINALS:
        fields = ORIGINALS[model_type][0] | {"num_layers": 5}
    return read_spec(Path(), fields | {"num_hidden_layers": 5} | changes)


def weight_map_of(name: str, depth: int, n_experts: int = 3) -> WeightMap:
    family = spec_of(name).family
    return WeightMap(family, depth, n_experts if family.router else 0)


def names_in(name: str, depth: int, layer: int) -> list[str]:
    """The state-dict names of a layer."""
    if layer in (0, depth + 1):
        return list(spec_of(name).shapes(0 if layer == 0 else 6))
    return list(spec_of(name).shapes(1 if layer - 1 in TABLES[name].dense else 2))


def block_prefix(family: Family) -> str:
    """How the names of a block's tensors begin on disk, up to the number."""
    return family.block[0].disk_names[0].partition("{i}")[0]


def consistent(weight_map: WeightMap, disk_name: str) -> bool:
    """Return whether a name on disk has no place, or one that gives the name back."""
    binding = weight_map.binding(disk_name)
    return binding is None or (
        disk_name in binding.disk
        and all(weight_map.binding_of(binding.layer, name) == binding for name in binding.names)
        and all(weight_map.binding(name) == binding for name in binding.disk)
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(names, depths, st.integers(1, 9))
def test_both_sides_look_up_the_same_binding_and_each_tensor_has_one(name: str, depth: int, n_experts: int) -> None:
    weight_map = weight_map_of(name, depth, n_experts)
    on_disk: list[str] = []
    for layer in range(depth + 2):
        bindings = weight_map.bindings(layer, names_in(name, depth, layer))
        covered = [tensor for binding in bindings for tensor in binding.names]
        assert sorted(covered) == sorted(names_in(name, depth, layer))
        for binding in bindings if layer in (0, 1, depth, depth + 1) else ():
            assert binding.layer == layer
            assert {weight_map.binding_of(layer, other) for other in binding.names} == {binding}
            assert {weight_map.binding(disk) for disk in binding.disk} == {binding}
        on_disk += [disk for binding in bindings for disk in binding.disk]
    assert len(set(on_disk)) == len(on_disk)


@settings(max_examples=100, deadline=None)
@given(names, st.integers(1, 12), st.integers(0, 14), st.text(min_size=1, max_size=30))
def test_made_up_names_never_get_the_place_of_another(name: str, depth: int, number: int, text: str) -> None:
    weight_map = weight_map_of(name, depth)
    disk_name = f"{block_prefix(weight_map.family)}{number}.{text}"
    assert consistent(weight_map, disk_name)
    assert number < depth or weight_map.binding(disk_name) is None
    for outside in (f"x{text}", f"model.norm.weight{text}x", f"lm_head.weight.{text}", f"x{text}.layers.0.{text}"):
        assert weight_map.binding(outside) is None


@settings(max_examples=150, deadline=None)
@given(names, depths, st.data(), numbers)
def test_numbers_count_only_in_range_and_as_written(name: str, depth: int, data: st.DataObject, number: str) -> None:
    weight_map = weight_map_of(name, depth)
    last = weight_map.binding_of(depth, data.draw(st.sampled_from(names_in(name, depth, depth))))
    start = f"{block_prefix(weight_map.family)}{depth - 1}."
    disk_name = data.draw(st.sampled_from(last.disk))
    assert disk_name.startswith(start)
    renumbered = f"{block_prefix(weight_map.family)}{number}.{disk_name.removeprefix(start)}"
    in_range = number in {str(known) for known in range(depth)}
    expected = weight_map.binding_of(int(number) + 1, last.names[0]) if in_range else None
    assert weight_map.binding(renumbered) == expected


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ROUTED), st.integers(1, MOST), st.data(), numbers)
def test_numbers_of_experts_likewise(name: str, n_experts: int, data: st.DataObject, number: str) -> None:
    weight_map = weight_map_of(name, 3, n_experts)
    binding = weight_map.binding_of(2, data.draw(st.sampled_from([GATE_UP, DOWN])))
    renumbered = re.sub(r"experts\.\d+", f"experts.{number}", data.draw(st.sampled_from(binding.disk)))
    in_range = number in {str(known) for known in range(n_experts)}
    assert (weight_map.binding(renumbered) == binding) == in_range
    assert consistent(weight_map, renumbered)


@pytest.mark.parametrize(
    ("name", "disk_name"),
    [
        ("baichuan", "model.layers.0.self_attn.q_proj.weight"),
        ("baichuan-7b", "model.layers.0.self_attn.v_proj.weight"),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj"),
        ("mixtral", "model.layers.0.mlp.experts.down_proj"),
        ("mixtral", "model.layers.0.mlp.gate.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj"),
        ("qwen3_moe-some-dense", "model.layers.0.mlp.experts.down_proj"),
        ("chatglm", "transformer.encoder.layers.0.self_attention.q_proj.weight"),
        ("bloom", "transformer.transformer.h.0.mlp.dense_h_to_4h.weight"),
    ],
)
def test_wildcard_gives_no_second_name_to_what_a_special_rule_stores(name: str, disk_name: str) -> None:
    assert weight_map_of(name, 3).binding(disk_name) is None


@pytest.mark.parametrize(("layer", "tensor"), [(0, "norm.weight"), (1, "embed_tokens.weight"), (4, "block.x")])
def test_tensor_that_the_layer_lacks_has_no_name(layer: int, tensor: str) -> None:
    with pytest.raises(KeyError, match="llama"):
        weight_map_of("llama", 3).binding_of(layer, tensor)


@pytest.mark.parametrize("name", TABLES)
def test_buffers_are_carried_weights_are_not_and_both_ends_of_a_tie_have_a_name(name: str) -> None:
    weight_map = weight_map_of(name, 3)
    buffers = {
        "chatglm": "transformer.rotary_pos_emb.inv_freq",
        "baichuan": "model.layers.0.self_attn.rotary_emb.inv_freq",
        "llama": "model.layers.2.self_attn.rotary_emb.inv_freq",
    }
    if name in buffers:
        assert weight_map.is_carried(buffers[name])
    for layer in range(5):
        for binding in weight_map.bindings(layer, names_in(name, 3, layer)):
            assert not any(weight_map.is_carried(disk) for disk in binding.disk)
    head, embedding = weight_map.tied_head, weight_map.tied_embedding
    assert weight_map.binding(head) == Binding((head,), 4, (HEAD_WEIGHT,))
    assert weight_map.binding(embedding) == Binding((embedding,), 0, (EMBEDDING_WEIGHT,))


def test_a_single_expert_has_shapes_on_disk_like_one_of_many() -> None:
    weight_map = weight_map_of("mixtral", 1, n_experts=1)
    shapes = {GATE_UP: torch.Size((1, 6, 4)), DOWN: torch.Size((1, 4, 3))}
    on_disk = [weight_map.binding_of(1, name).disk_shapes(shapes) for name in shapes]
    expert = "model.layers.0.block_sparse_moe.experts.0"
    assert on_disk == [{f"{expert}.w1.weight": (3, 4), f"{expert}.w3.weight": (3, 4)}, {f"{expert}.w2.weight": (4, 3)}]


def test_rows_keep_their_order() -> None:
    fused = torch.tensor([[0], [1], [2], [3]])
    query, key, value = reshape_rows([fused], [torch.Size((2, 1)), torch.Size((1, 1)), torch.Size((1, 1))])
    assert (query.tolist(), key.tolist(), value.tolist()) == ([[0], [1]], [[2]], [[3]])
    gate_0, up_0, gate_1, up_1 = (torch.full((2, 1), number) for number in (0, 10, 1, 11))
    (stacked,) = reshape_rows([gate_0, up_0, gate_1, up_1], [torch.Size((2, 4, 1))])
    assert stacked[:, :, 0].tolist() == [[0, 0, 10, 10], [1, 1, 11, 11]]

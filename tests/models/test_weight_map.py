"""Shows that every family's naming table can be read in both directions, for any depth."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.architectures import FAMILIES, Slot, WeightMap, family_of
from models.spec import ModelSpec
from tests.conftest import TINY

families = st.sampled_from(sorted(FAMILIES))
depths = st.integers(1, 130)


@cache
def layer_names(model_type: str) -> tuple[list[str], list[str], list[str]]:
    """The state-dict names of the embedding, of a block and of the head."""
    spec = spec_of(model_type, 1)
    return tuple(list(spec.shapes(layer)) for layer in range(3))  # type: ignore[return-value]


def spec_of(model_type: str, depth: int) -> ModelSpec:
    config = CONFIG_MAPPING[model_type](**(TINY | {"num_hidden_layers": depth}))
    return ModelSpec(family_of(model_type), config)


def block_prefix(model_type: str) -> str:
    """How the names of a block's tensors begin on disk, up to the number."""
    return family_of(model_type).block[0].disk.partition("{i}")[0]


@st.composite
def slots(draw: st.DrawFn) -> tuple[WeightMap, Slot]:
    """A naming table of some depth and a tensor of one of its layers."""
    model_type, depth = draw(families), draw(depths)
    layer = draw(st.integers(0, depth + 1))
    embedding, block, head = layer_names(model_type)
    names = embedding if layer == 0 else head if layer == depth + 1 else block
    return WeightMap(family_of(model_type), depth), Slot(layer, draw(st.sampled_from(names)))


@settings(deadline=None)
@given(slots())
def test_slot_inverts_disk_name(drawn: tuple[WeightMap, Slot]) -> None:
    weight_map, slot = drawn
    disk_name = weight_map.disk_name(slot)
    assert weight_map.slot(disk_name) == slot
    assert weight_map.disk_name(Slot(slot.layer, slot.name)) == disk_name


@settings(deadline=None)
@given(families, depths, st.integers(0, 140), st.text(min_size=1, max_size=30))
def test_disk_name_inverts_slot_for_any_name_in_a_block(model_type: str, depth: int, number: int, rest: str) -> None:
    weight_map = WeightMap(family_of(model_type), depth)
    disk_name = f"{block_prefix(model_type)}{number}.{rest}"
    slot = weight_map.slot(disk_name)
    if slot is not None:
        assert weight_map.disk_name(slot) == disk_name
    if rest.isprintable():
        assert (slot is not None) == (number < depth)


@settings(max_examples=40, deadline=None)
@given(families, st.integers(1, 12))
def test_every_tensor_of_a_model_has_its_own_name_on_disk(model_type: str, depth: int) -> None:
    spec = spec_of(model_type, depth)
    all_slots = [Slot(layer, name) for layer in range(spec.n_layers) for name in spec.shapes(layer)]
    disk_names = [spec.weight_map.disk_name(slot) for slot in all_slots]
    assert len(set(disk_names)) == len(all_slots)
    assert [spec.weight_map.slot(name) for name in disk_names] == all_slots


@settings(deadline=None)
@given(families, depths, st.from_regex(r"\d{1,4}", fullmatch=True))
def test_block_numbers_count_only_in_range_and_as_written(model_type: str, depth: int, number: str) -> None:
    slot = WeightMap(family_of(model_type), depth).slot(f"{block_prefix(model_type)}{number}.mlp.up_proj.weight")
    in_range = number in {str(known) for known in range(depth)}
    assert slot == (Slot(int(number) + 1, "block.mlp.up_proj.weight") if in_range else None)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("number", ["3", "4", "01", "00", "-1", "+1", "1 ", "", "x", "١"])
def test_block_out_of_range_has_no_slot(model_type: str, number: str) -> None:
    weight_map = WeightMap(family_of(model_type), 3)
    assert weight_map.slot(f"{block_prefix(model_type)}{number}.mlp.up_proj.weight") is None
    assert weight_map.slot(f"{block_prefix(model_type)}2.mlp.up_proj.weight") is not None


@pytest.mark.parametrize("slot", [Slot(0, "norm.weight"), Slot(1, "embed_tokens.weight"), Slot(4, "block.x")])
def test_tensor_that_the_layer_lacks_has_no_name(slot: Slot) -> None:
    with pytest.raises(KeyError, match="llama"):
        WeightMap(family_of("llama"), 3).disk_name(slot)


def test_rotary_buffers_are_carried_and_weights_are_not() -> None:
    weight_map = WeightMap(family_of("llama"), 3)
    assert weight_map.is_carried("model.layers.0.self_attn.rotary_emb.inv_freq")
    for layer, names in enumerate(layer_names("llama")):
        for name in names:
            assert not weight_map.is_carried(weight_map.disk_name(Slot(layer if layer < 2 else 4, name)))


def test_names_without_the_optional_prefix_have_the_same_places() -> None:
    full = spec_of("bloom", 2).weight_map
    slots = [Slot(layer, name) for layer in range(4) for name in spec_of("bloom", 2).shapes(layer)]
    short_names = [full.disk_name(slot).removeprefix("transformer.") for slot in slots]
    short = full.for_names(short_names)
    assert [short.slot(name) for name in short_names] == slots
    assert [short.disk_name(slot) for slot in slots] == short_names
    assert full.for_names(full.disk_name(slot) for slot in slots) == full

"""What a spec with eyes has: names, shapes, refusals, what is trained and what autograd keeps."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import CausalLM, CheckpointError
from models.adapters import Lora, Trained
from models.api import read_spec
from models.attention.positions import Positions
from models.checkpoint.layout import CARRIED, layer_file
from models.checkpoint.side_files import copy_side_files
from models.checkpoint.source import HuggingFaceSource, PipelineSource, same_bytes
from models.checkpoint.tensor_files import SafetensorsFile, save_state_dict
from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.derived.proof import CPU
from models.images import frozen, seeing
from models.images.embedding import SeeingEmbedding
from models.images.seeing import Train
from models.loading import SeededStates
from tests.models.helpers import saved_tensors
from tests.models.images.conftest import golden_of
from tests.models.images.golden import Golden


def copied(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a golden folder with another config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return target


def as_run_writes(golden: Golden, target: Path) -> Path:
    """The checkpoint of a run that changed nothing."""
    return written(golden.source, target)


def written(source: HuggingFaceSource | PipelineSource, target: Path) -> Path:
    """The layers of a source in a folder of their own, with what belongs beside them."""
    target.mkdir()
    for layer in range(source.spec.n_layers):
        save_state_dict(source.read_layer(layer), target / layer_file(layer))
    copy_side_files(source.folder, target, source.spec, in_folders=True)
    return target


def test_a_foreign_round_trip_is_bit_for_bit(golden: Golden, tmp_path: Path) -> None:
    run = as_run_writes(golden, tmp_path / "run")
    spec = read_spec(run)
    assert spec.family.sees == golden.sees
    assert spec.shapes(0) == golden.spec.shapes(0)
    for layer in range(spec.n_layers):
        PipelineSource(run, spec).check_layer(layer)

    pp_to_hg(run, tmp_path / "export")
    wanted, found = (load_file(folder / "model.safetensors") for folder in (golden.folder, tmp_path / "export"))
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], wanted[name]) for name in wanted)


def test_a_tower_beside_the_layers_is_found(golden: Golden, tmp_path: Path) -> None:
    """As `hg_to_pp` leaves it, with a tensor beside it that belongs to no layer; a run with images moves it."""
    folder = copied(golden.folder, tmp_path / "model")
    state = load_file(folder / "model.safetensors") | {"audio_tower.weight": torch.ones(3)}
    save_file(state, folder / "model.safetensors")
    hg_to_pp(folder, tmp_path / "layers", verify=True)
    blind = read_spec(tmp_path / "layers")
    assert blind.family.sees is None
    assert not any(name.startswith("eyes.") for name in PipelineSource(tmp_path / "layers", blind).read_layer(0))

    source = PipelineSource(tmp_path / "layers", seeing(blind))
    found, wanted = source.read_layer(0), golden.source.read_layer(0)
    assert found.keys() == wanted.keys() == source.infos(0).keys()
    assert all(same_bytes(found[name], wanted[name]) for name in wanted)

    for name, spec in (("images", source.spec), ("text", blind)):
        own = PipelineSource(tmp_path / "layers", spec)
        run = written(own, tmp_path / name)
        carried = SafetensorsFile(run / CARRIED)
        assert ([*carried] == ["audio_tower.weight"]) == (name == "images")
        pp_to_hg(run, tmp_path / f"{name}-export")
        exported = load_file(tmp_path / f"{name}-export" / "model.safetensors")
        assert exported.keys() == state.keys()
        assert all(same_bytes(exported[each], state[each]) for each in state)


def test_every_weight_belongs_to_a_layer(golden: Golden) -> None:
    assert golden.source.carried == []
    assert not any(
        name.startswith("eyes.") for layer in (1, golden.spec.n_layers - 1) for name in golden.spec.shapes(layer)
    )


def test_names_as_they_are_in_memory_are_read_too(golden: Golden, tmp_path: Path) -> None:
    """As programs write them that know of no conversion."""
    folder = copied(golden.folder, tmp_path / "model")
    beside = {rule.disk_names[0]: rule.module_names[0] for rule in golden.sees.rules}
    state = load_file(folder / "model.safetensors")
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        begin = next((disk for disk in beside if name.startswith(disk.removesuffix("*"))), None)
        if begin is None:
            text = re.sub(r"^(language_model\.model\.|model\.language_model\.|model\.)", "model.language_model.", name)
            renamed[text.replace("language_model.lm_head", "lm_head")] = tensor
        else:
            inside = beside[begin].removesuffix("*").removeprefix("eyes.")
            renamed["model." + inside + name.removeprefix(begin.removesuffix("*"))] = tensor
    save_file(renamed, folder / "model.safetensors")

    spec = seeing(read_spec(folder))
    source = HuggingFaceSource(folder, spec)
    assert source.carried == []
    for name, tensor in golden.source.read_layer(0).items():
        assert same_bytes(source.read_layer(0)[name], tensor)


@torch.no_grad()
def test_text_alone_is_bit_for_bit_that_of_the_model_without_eyes(golden: Golden) -> None:
    spec = read_spec(golden.folder)
    blind = CausalLM(spec, HuggingFaceSource(golden.folder, spec), torch.float32, CPU).eval()
    ids = golden.ids(2)[None]
    assert torch.equal(blind(ids), golden.model(ids))


def test_nothing_is_kept_of_a_tower_that_is_not_trained(golden: Golden) -> None:
    """And of one whose projector alone is trained nothing but what goes into that."""
    kept: dict[str, int] = {}
    for train in get_args(Train):
        spec = golden.spec.training(Trained(freeze=(*frozen(golden.spec, train), "embed_tokens|lm_head")))
        model = CausalLM(spec, HuggingFaceSource(golden.folder, spec), torch.float32, CPU, part=[0]).train()
        positions = torch.arange(len(golden.ids(0)))[None]
        model.positions.expect([golden.documents(0)])
        with saved_tensors() as saved:
            model.activations(golden.ids(0)[None], positions, images=golden.images(0))
        kept[train] = sum(each.nbytes for each in saved)
    assert kept["nothing"] == 0
    assert 0 < kept["projector"] < kept["all"]


def test_a_frozen_tower_stays_in_evaluation_mode(golden: Golden) -> None:
    wanted: dict[Train, bool] = {"nothing": False, "all": True}
    for train, training in wanted.items():
        spec = golden.spec.training(Trained(freeze=frozen(golden.spec, train)))
        layer: Any = spec.build(0).train()
        assert layer.training
        assert layer.eyes.training == training


def test_what_is_frozen_is_named_on_disk(golden: Golden) -> None:
    names = [name for name in golden.source.names if golden.source.weight_map.binding(name).layer == 0]  # type: ignore[union-attr]
    tower = [name for name in names if not name.endswith("embed_tokens.weight")]
    nothing, projector = frozen(golden.spec, "nothing"), frozen(golden.spec, "projector")
    assert [name for name in names if not matches(nothing, name)] == [name for name in names if name not in tower]
    trained = {name for name in tower if not matches(projector, name)}
    assert trained == {name for name in tower if "merger" in name or "multi_modal_projector" in name}
    assert frozen(golden.spec, "all") == ()


def matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


@pytest.mark.parametrize("targets", [("q_proj",), "all-linear", r".*\.q_proj"])
def test_a_tower_gets_no_adapters(targets: str | tuple[str, ...], shared: Path) -> None:
    """A tower has modules of the same names as the decoder, and is left as it is."""
    spec = golden_of(shared, "llava-tiny").spec.training(Trained(lora=Lora(targets=targets)))
    assert not spec.trained_names(0)
    assert spec.trained_names(1)


def test_fresh_weights_are_those_of_transformers_own_beginning(golden: Golden) -> None:
    fresh = SeededStates(golden.spec, seed=7)
    state = fresh.read_layer(0)
    assert state.keys() == golden.spec.shapes(0).keys()
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    again, other = fresh.read_layer(0), SeededStates(golden.spec, seed=8).read_layer(0)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    assert any(not torch.equal(other[name], tensor) for name, tensor in state.items() if name.startswith("eyes."))


def test_a_cast_leaves_angles_as_they_are(shared: Path) -> None:
    """An engine casts the whole module; a tower's frequencies rounded to bf16 would be others."""
    layer: Any = golden_of(shared, "qwen3_vl-tiny").spec.build(0)
    before = {name: each.clone() for name, each in layer.eyes.named_buffers()}
    layer.bfloat16()
    after = dict(layer.eyes.named_buffers())
    assert before and all(torch.equal(after[name], each) for name, each in before.items())
    assert layer.embed_tokens.weight.dtype == torch.bfloat16


def test_counts_that_differ_are_named(golden: Golden) -> None:
    ids, token = golden.ids(0)[None], golden.sees.image_token
    count = int((ids == token).sum())
    with pytest.raises(ValueError, match=rf"{count} image tokens \({token}\) and no images"):
        golden.model(ids)
    more = torch.cat([ids, torch.full((1, 1), token)], dim=1)
    layer: Any = golden.model.layers[0]
    alone = SeeingEmbedding(golden.spec.family, golden.spec.config)
    alone.load_state_dict(layer.state_dict())
    with pytest.raises(ValueError, match=rf"{count + 1} image tokens \({token}\) and {count} features"):
        alone((more, torch.arange(more.shape[1])[None], *golden.images(0)))


@pytest.mark.parametrize(("name", "missing"), [("qwen3_vl-tiny", "three axes"), ("gemma3-tiny", "both ways")])
def test_images_without_what_blocks_have_to_know_are_refused(name: str, missing: str, shared: Path) -> None:
    golden = golden_of(shared, name)
    ids, positions = golden.packed(0)
    golden.model.positions.expect([golden.documents(0).seeing(None, None)])
    with pytest.raises(ValueError, match=missing):
        golden.model(ids, positions, images=golden.images(0))


def test_deep_features_that_no_block_takes_are_refused(shared: Path) -> None:
    golden = golden_of(shared, "qwen3_vl-tiny")
    first = CausalLM(golden.spec, golden.source, torch.float32, CPU, part=[0, 1])
    ids, positions = golden.packed(0)
    first.activations(ids, positions, images=golden.images(0))
    with pytest.raises(ValueError, match="expected these beside the embedding"):
        first.activations(ids, positions.clone(), images=golden.images(0))


def test_parts_of_rows_are_refused(golden: Golden) -> None:
    assert not golden.spec.family.shares_rows
    assert not golden.spec.family.chunks_rows


def test_images_of_a_model_without_eyes_are_refused(golden: Golden) -> None:
    spec = read_spec(golden.folder)
    blind = CausalLM(spec, HuggingFaceSource(golden.folder, spec), torch.float32, CPU)
    with pytest.raises(ValueError, match="opened without eyes"):
        blind(golden.ids(0)[None], images=golden.images(0))


def test_a_model_of_text_has_no_eyes(llama: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="expected a model of images and text"):
        seeing(read_spec(llama()))


def test_a_tower_that_is_missing_is_named(shared: Path, tmp_path: Path) -> None:
    golden = golden_of(shared, "llava-tiny")
    folder = copied(golden.folder, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in state.items() if "vision_tower" not in name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="missing weights: vision_tower"):
        HuggingFaceSource(folder, seeing(read_spec(folder)))


def test_a_kernel_without_masks_is_refused(shared: Path) -> None:
    golden = golden_of(shared, "gemma3-tiny")
    assert golden.spec.attention == ("sdpa_by_document",)
    positions: Positions = golden.spec.positions()
    positions.config = replace_kernel(golden, "flash_attention_2")
    ids, its = golden.packed(0)
    positions.expect([golden.documents(0)])
    with pytest.raises(ValueError, match="takes no masks"):
        positions("full_attention", torch.zeros(*ids.shape, golden.spec.config.hidden_size), its)


def replace_kernel(golden: Golden, kernel: str) -> Any:
    config = type(golden.spec.config).from_dict(golden.spec.config.to_dict())
    config._attn_implementation = kernel
    return config


FLAT = {  # as Qwen2.5-VL is published: fields of the decoder beside those of the whole
    "model_type": "qwen2_5_vl",
    "hidden_size": 64,
    "intermediate_size": 96,
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100,
    "vision_config": {
        "depth": 4,
        "fullatt_block_indexes": [1, 3],
        "hidden_size": 32,
        "in_chans": 3,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "window_size": 56,
    },
}


def test_a_config_in_one_piece_is_read() -> None:
    spec = seeing(read_spec(Path(), FLAT))
    assert spec.config.model_type == "qwen2_5_vl_text"
    assert (spec.n_blocks, spec.tied, spec.is_part) == (3, True, True)
    assert spec.family.sees and spec.family.sees.axes == 3
    assert len([name for name in spec.shapes(0) if name.endswith("attn.qkv.weight")]) == 4

"""What the section `mtp` takes and refuses, and what of a model it trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from models.ahead.model import stored_ahead
from models.ahead.names import APART, BEHIND_THE_BLOCKS, BY_PART
from models.api import read_spec
from models.checkpoint.source import HuggingFaceSource
from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from options import RunConfig
from tests.options.multi_token.folders import add_layers_ahead
from training.errors import ConfigError
from training.trained import with_trained

KEYS: dict[str, Any] = {"data_path": "records.json", "save_path": "run", "train_batch_size": 2}


def config_of(model: Path, mtp: dict[str, Any] | None, **more: Any) -> RunConfig:
    return RunConfig.model_validate(KEYS | {"model_path": str(model), "mtp": mtp} | more)


@pytest.fixture(scope="module")
def plain(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def with_layers(make_checkpoint: Callable[..., Path]) -> Path:
    folder = make_checkpoint("qwen3", tie_word_embeddings=False)
    add_layers_ahead(folder, 2)
    return folder


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"mtp": {}, "preference": {"loss": "dpo"}},
            "mtp: learns what records say, and preference has a loss of its own",
        ),
        ({"mtp": {}, "labels": ["a", "b"]}, "labels has a loss of its own"),
        ({"mtp": {}, "distillation": {"teacher": "t"}}, "distillation has a loss of its own"),
        ({"mtp": {"init": "copy"}, "lora": {"r": 4}}, "expected no init, or no lora"),
        ({"mtp": {"only": True}, "lora": {"r": 4}}, "mtp.only: trains these layers in full; expected no lora"),
        ({"mtp": {"only": True}, "freeze": ["norm"]}, "mtp.only: trains these layers alone; expected no freeze"),
        ({"mtp": {"only": True, "detach": False}}, "mtp.only: nothing else learns"),
        ({"mtp": {"weight": 0}}, "mtp.weight"),
        ({"mtp": {"depth": 0}}, "mtp.depth"),
        ({"mtp": {"init": "random"}}, "mtp.init"),
        ({"mtp": {"detached": True}}, "detached"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        RunConfig.model_validate(KEYS | {"model_path": "model"} | keys)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("name", "mtp", "line"),
    [
        ("plain", {}, "has no layers that predict ahead; expected init: copy, which makes some"),
        ("with_layers", {"depth": 3}, "has 2; expected at most that"),
        ("with_layers", {"init": "copy"}, "has such layers; expected no init, which trains them"),
    ],
)
def test_a_model_that_has_other_layers_is_refused_in_a_line(
    name: str, mtp: dict[str, Any], line: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    with pytest.raises(ConfigError, match=r"^mtp") as refused:
        with_trained(read_spec(folder), config_of(folder, mtp))
    assert str(refused.value).endswith(line) and str(folder) in str(refused.value)


def test_a_run_that_trained_them_is_not_trained_on_without(with_layers: Path) -> None:
    trained = with_trained(read_spec(with_layers), config_of(with_layers, {}))
    with pytest.raises(ConfigError, match="expected to train them along, or the folder that pp_to_hg makes of it"):
        with_trained(trained, config_of(with_layers, None))


def test_layers_of_other_names_are_refused(plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    state = load_file(plain / "model.safetensors")
    state["model.layers.3.transformer_block.up.weight"] = state["model.norm.weight"].clone()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pytest.raises(ConfigError, match="names its layers ahead in a way that is not known; expected no mtp"):
        with_trained(read_spec(tmp_path), config_of(tmp_path, {}))


def test_a_folder_of_hg_to_pp_is_refused_and_gives_the_layers_back(with_layers: Path, tmp_path: Path) -> None:
    hg_to_pp(with_layers, tmp_path / "pp")
    with pytest.raises(ConfigError, match="in the pipeline layout, which keeps layers ahead apart"):
        with_trained(read_spec(tmp_path / "pp"), config_of(tmp_path / "pp", {}))
    pp_to_hg(tmp_path / "pp", tmp_path / "hg")
    given, back = (load_file(folder / "model.safetensors") for folder in (with_layers, tmp_path / "hg"))
    assert (tmp_path / "hg" / "model.safetensors").read_bytes() == (with_layers / "model.safetensors").read_bytes()
    assert given.keys() == back.keys()


def test_a_copy_that_is_none_is_carried_as_it_is(with_layers: Path, tmp_path: Path) -> None:
    """A round trip gives a file back to the byte, also where a layer has an embedding of its own."""
    state = load_file(with_layers / "model.safetensors")
    own = "model.layers.3.embed_tokens.weight"
    state[own] = state[own] + 1
    folder = tmp_path / "own"
    folder.mkdir()
    for path in with_layers.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    hg_to_pp(folder, tmp_path / "pp")
    pp_to_hg(tmp_path / "pp", tmp_path / "hg")
    assert load_file(tmp_path / "hg" / "model.safetensors")[own].equal(state[own])


def test_the_first_of_several_layers_can_be_trained_alone(with_layers: Path) -> None:
    spec = with_trained(read_spec(with_layers), config_of(with_layers, {"depth": 1}))
    assert spec.horizon == 2
    source = HuggingFaceSource(with_layers, spec)
    source.check_layer(spec.n_layers - 1)
    assert any(name.startswith("model.layers.4.") for name in source.carried)
    assert not any(name.startswith("model.layers.3.self_attn") for name in source.carried)


def test_only_the_layers_ahead_are_trained_where_that_is_asked_for(with_layers: Path) -> None:
    spec = with_trained(read_spec(with_layers), config_of(with_layers, {"only": True}))
    assert not any(spec.trained_names(layer) for layer in range(spec.n_layers - 1))
    trained = spec.trained_names(spec.n_layers - 1)
    assert trained and all(name.startswith("ahead.") for name in trained)
    assert len(trained) == sum(name.startswith("ahead.") for name in spec.shapes(spec.n_layers - 1))


def test_a_plan_counts_them_without_weights(with_layers: Path, tmp_path: Path) -> None:
    """config.json alone tells of them; new ones need nothing."""
    (tmp_path / "config.json").write_bytes((with_layers / "config.json").read_bytes())
    assert with_trained(read_spec(tmp_path), config_of(tmp_path, {})).horizon == 3


@pytest.mark.parametrize(
    ("name", "naming", "depth"),
    [
        ("glm4_moe-tiny", BEHIND_THE_BLOCKS, 1),
        ("deepseek_v3-tiny-2deep", BEHIND_THE_BLOCKS, 2),
        ("qwen3_5-text-tiny", APART, 1),
        ("qwen3_next-tiny", APART, 1),
        ("ernie4_5_moe-tiny", BY_PART, 1),
    ],
)
def test_a_folders_tensors_tell_how_the_layers_are_named(name: str, naming: Any, depth: int, shared: Path) -> None:
    folder = shared / "golden" / "mtp" / name
    found = stored_ahead(folder, read_spec(folder))
    assert found and (found.naming, found.depth) == (naming, depth)

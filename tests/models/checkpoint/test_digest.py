"""A model is known by every weight and by its config, whatever its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.api import read_spec
from models.checkpoint.digest import model_digest
from models.checkpoint.layout import resolve
from models.checkpoint.source import PipelineSource, open_source
from models.conversion.to_pipeline import hg_to_pp

Make = Callable[..., Path]


def digest(folder: Path, notes: Path | None = None) -> str:
    folder = resolve(folder)
    return model_digest(open_source(folder, read_spec(folder)), notes)


def set_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "bloom", "gpt_neox"])
def test_any_number_of_any_weight_counts(model_type: str, make_checkpoint: Make) -> None:
    folder = make_checkpoint(model_type)
    state, known = load_file(folder / "model.safetensors"), {digest(folder)}
    assert digest(folder) in known
    for number, (name, weight) in enumerate(state.items()):
        changed = weight.clone()
        changed.view(-1)[(number * 7919) % weight.numel()] += 1e-3
        save_file(state | {name: changed}, folder / "model.safetensors", metadata={"format": "pt"})
        known.add(digest(folder))
    assert len(known) == len(state) + 1


def test_exchanged_weights_count(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama")
    state, before = load_file(folder / "model.safetensors"), digest(folder)
    one, other = (f"model.layers.{number}.self_attn.q_proj.weight" for number in (0, 1))
    save_file(state | {one: state[other], other: state[one]}, folder / "model.safetensors", metadata={"format": "pt"})
    assert digest(folder) != before


@pytest.mark.parametrize("fields", [{"rope_theta": 500.0}, {"rms_norm_eps": 1e-3}, {"sliding_window": 4}])
def test_the_config_counts_and_is_told_apart_from_the_weights(fields: dict[str, Any], make_checkpoint: Make) -> None:
    folder = make_checkpoint("mistral")
    before = digest(folder).split("-")
    if "rope_theta" in fields:
        fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    set_config(folder, **fields)
    after = digest(folder).split("-")
    assert after[0] == before[0] and after[1] != before[1]


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "phi3", "gemma2"])
def test_layout_files_and_wider_numbers_do_not_count(model_type: str, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = make_checkpoint(model_type)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, each in (("bf16", model), ("fp32", model.float())):
        each.save_pretrained(tmp_path / name)
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    hg_to_pp(tmp_path / "shards", tmp_path / "layers")
    set_config(tmp_path / "shards", use_cache=False, transformers_version="5.0.0", architectures=["Other"])
    found = {name: digest(tmp_path / name) for name in ("bf16", "fp32", "shards", "layers")}
    assert len(set(found.values())) == 1, found
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


def test_a_note_spares_the_reading_until_a_file_changes(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.digests.SETTLED", -1.0)
    hg_to_pp(make_checkpoint("llama"), tmp_path / "layers")
    read: list[int] = []
    read_layer = PipelineSource.read_layer

    def counted(self: PipelineSource, layer: int) -> dict[str, torch.Tensor]:
        read.append(layer)
        return read_layer(self, layer)

    monkeypatch.setattr(PipelineSource, "read_layer", counted)
    before = digest(tmp_path / "layers", tmp_path / "notes")
    assert read and read == sorted(read)
    read.clear()
    assert digest(tmp_path / "layers", tmp_path / "notes") == before and not read
    set_config(tmp_path / "layers", rms_norm_eps=1e-3)
    assert digest(tmp_path / "layers", tmp_path / "notes") != before
    path = tmp_path / "layers" / "layer_02-model_states.pt"
    state = torch.load(path, weights_only=True)
    torch.save(state | {next(iter(state)): next(iter(state.values())) + 1}, path)
    assert digest(tmp_path / "layers", tmp_path / "notes").split("-")[0] != before.split("-")[0]

"""Which files of a folder count: the format that is preferred, a run's newest checkpoint, the manifest, links."""

from __future__ import annotations

import json
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
from tests.models.helpers import (
    BIN_INDEX,
    CONVERTERS,
    LAYOUTS,
    SAFETENSORS_INDEX,
    assert_round_trip,
    contents,
    copy_of,
    error_line,
    joined,
    random_ids,
    read_weights,
    write_weights,
)

SHARD = "model-00002-of-00005.safetensors"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def logits(folder: Path) -> Tensor:
    with torch.inference_mode():
        found: Tensor = load_model(folder)(random_ids(1, 8))
        return found


def test_safetensors_are_read_where_bin_files_are_beside_them(llama: Callable[..., Path], tmp_path: Path) -> None:
    """A whole .bin file, or the index of .bin shards that `download` did not fetch."""
    folder = copy_of(llama(), tmp_path / "both")
    others = {name: tensor + 1 for name, tensor in joined(read_weights(folder)).items()}
    torch.save(others, folder / "pytorch_model.bin")
    torch.testing.assert_close(logits(folder), logits(llama()), atol=0, rtol=0)
    (folder / "pytorch_model.bin").unlink()
    weight_map = dict.fromkeys(others, "pytorch_model-00001-of-00002.bin")
    (folder / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    torch.testing.assert_close(logits(folder), logits(llama()), atol=0, rtol=0)
    assert_round_trip(folder, tmp_path)


@pytest.mark.parametrize("single", ["model.safetensors", "pytorch_model.bin"])
def test_a_single_file_beside_an_index_counts_only_where_files_of_the_index_are_missing(
    single: str, both_layouts: dict[str, Path], tmp_path: Path
) -> None:
    """transformers reads the single file in any case; with both complete, somebody trained one of them."""
    folder = copy_of(both_layouts["huggingface"], tmp_path / "two")
    files = read_weights(folder)
    if single.endswith(".bin"):
        files = {f"pytorch_{file}".replace(".safetensors", ".bin"): tensors for file, tensors in files.items()}
    write_weights(folder, files)
    index = next(folder.glob("*.index.json"))
    newer = {name: tensor + 1 for name, tensor in joined(files).items()}
    write_weights(tmp_path, {single: newer})
    (tmp_path / single).rename(folder / single)
    line = error_line(lambda: load_model(folder))
    assert str(folder / single) in line and index.name in line

    (folder / max(files)).unlink()
    found = load_model(folder).embedding.embed_tokens.weight
    torch.testing.assert_close(found, newer["model.embed_tokens.weight"], atol=0, rtol=0)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(newer, single)}))  # as an index may list it
    assert load_model(folder).spec.n_blocks == 2


def test_the_folder_of_a_run_stands_for_its_newest_checkpoint(both_layouts: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy_of(both_layouts["pipeline"], run / "step_8")
    (run / "latest").write_text("step_8\n")
    torch.testing.assert_close(logits(run), logits(both_layouts["pipeline"]), atol=0, rtol=0)
    (run / "latest").write_text("step_9")
    assert error_line(lambda: load_model(run)) == f"{run / 'step_9'}: not found, but {run / 'latest'} names it"


@pytest.mark.parametrize("beside", [True, False], ids=["beside a model", "alone"])
def test_an_adapter_is_no_model(beside: bool, llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(llama(), tmp_path / "adapter") if beside else tmp_path
    (folder / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    for read in (load_model, lambda path: hg_to_pp(path, tmp_path / "layers")):
        assert f"{folder}: an adapter (adapter_config.json)" in error_line(partial(read, folder))


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown-field": lambda manifest: manifest.update(colour={}),
    "empty": lambda manifest: manifest.clear(),
    "weights-outside": lambda manifest: manifest["files"].update({"../a.safetensors": manifest["files"].pop(SHARD)}),
    "side-files-outside": lambda manifest: manifest["side_files"].append("../bad/config.json"),
    "side-files-below": lambda manifest: manifest["side_files"].append("additional_chat_templates/../x"),
    "without-a-weight": lambda manifest: manifest["files"][SHARD].pop(),
    "a-weight-twice": lambda manifest: manifest["files"][SHARD].append(QUERY),
    "an-unknown-weight": lambda manifest: manifest["files"][SHARD].append("model.layers.9.x"),
    "an-unknown-dtype": lambda manifest: manifest["dtypes"].update({QUERY: "F99"}),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_damaged_manifest_is_refused(both_layouts: dict[str, Path], name: str, tmp_path: Path) -> None:
    folder = copy_of(both_layouts["pipeline"], tmp_path / "bad")
    manifest = json.loads((folder / "pipetune.json").read_text())
    MANIFESTS[name](manifest)
    (folder / "pipetune.json").write_text(json.dumps(manifest))
    assert str(folder / "pipetune.json") in error_line(lambda: pp_to_hg(folder, tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [folder]


def test_one_tensor_in_two_files_without_an_index_is_refused(llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(llama(), tmp_path / "twice")
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    tensors = joined(read_weights(folder))
    moved = {QUERY: tensors.pop(QUERY)}
    write_weights(folder, {first: tensors, second: moved}, index=False)
    torch.testing.assert_close(logits(folder), logits(llama()), atol=0, rtol=0)
    write_weights(folder, {first: tensors | {QUERY: moved[QUERY] + 1}, second: moved}, index=False)
    line = error_line(lambda: load_model(folder))
    assert all(name in line for name in (first, second, QUERY))


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "below/outside.safetensors", "..", ""])
def test_names_that_lead_out_of_the_folder_are_refused(place: str, llama: Callable[..., Path], tmp_path: Path) -> None:
    """In the index of the weights, and in `latest`."""
    folder = copy_of(llama(), tmp_path / "folder")
    write_weights(folder, {SHARD: joined(read_weights(folder))}, index=True)
    path = folder / SAFETENSORS_INDEX
    path.write_text(path.read_text().replace(SHARD, place, 1))
    assert str(path) in error_line(lambda: load_model(folder))
    (tmp_path / "latest").write_text(place)
    assert str(tmp_path / "latest") in error_line(lambda: load_model(tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_are_followed_in_huggingfaces_cache_alone(
    both_layouts: dict[str, Path], layout: str, tmp_path: Path
) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    copy_of(both_layouts[layout], snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    CONVERTERS[layout](snapshot, tmp_path / "out")
    CONVERTERS[layout](both_layouts[layout], tmp_path / "expected")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())

    (tmp_path / "secret").write_text("secret")
    tokenizer = snapshot / "tokenizer.json"
    tokenizer.unlink()
    tokenizer.symlink_to(tmp_path / "secret")
    assert f"{tokenizer}: a link that" in error_line(lambda: CONVERTERS[layout](snapshot, tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()

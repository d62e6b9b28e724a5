"""Shows which files of a folder count: the format that is preferred, a run's newest checkpoint, the manifest."""

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


def test_safetensors_are_read_where_a_bin_file_lies_beside_them(llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(llama(), tmp_path / "both")
    others = {name: tensor + 1 for name, tensor in joined(read_weights(folder)).items()}
    torch.save(others, folder / "pytorch_model.bin")
    torch.testing.assert_close(logits(folder), logits(llama()), atol=0, rtol=0)


def test_index_of_bin_shards_that_were_not_fetched_does_not_matter(llama: Callable[..., Path], tmp_path: Path) -> None:
    """What `download` leaves of a repository with one safetensors file and several .bin shards."""
    folder = copy_of(llama(), tmp_path / "fetched")
    weight_map = dict.fromkeys(joined(read_weights(folder)), "pytorch_model-00001-of-00002.bin")
    (folder / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    torch.testing.assert_close(logits(folder), logits(llama()), atol=0, rtol=0)
    assert_round_trip(folder, tmp_path)


@pytest.mark.parametrize("single", ["model.safetensors", "pytorch_model.bin"])
def test_a_single_file_beside_an_index_of_others_counts_where_these_are_gone(
    single: str, both_layouts: dict[str, Path], tmp_path: Path
) -> None:
    """transformers takes the single file in any case; where the others are there too, somebody trained one of them."""
    folder = copy_of(both_layouts["huggingface"], tmp_path / "two")
    files = read_weights(folder)
    if single.endswith(".bin"):
        files = {f"pytorch_{file}".replace(".safetensors", ".bin"): tensors for file, tensors in files.items()}
    write_weights(folder, files)
    index = next(folder.glob("*.index.json"))
    newer = {name: tensor + 1 for name, tensor in joined(files).items()}
    write_weights(tmp_path, {single: newer})
    (tmp_path / single).rename(folder / single)
    told = error_line(lambda: load_model(folder))
    assert str(folder / single) in told and index.name in told

    (folder / max(files)).unlink()
    found = load_model(folder).embedding.embed_tokens.weight
    torch.testing.assert_close(found, newer["model.embed_tokens.weight"], atol=0, rtol=0)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(newer, single)}))  # as an index may list it
    assert load_model(folder).spec.n_blocks == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folder_of_a_run_stands_for_its_newest_checkpoint(
    both_layouts: dict[str, Path], layout: str, tmp_path: Path
) -> None:
    copy_of(both_layouts[layout], tmp_path / "run" / "step_8")
    (tmp_path / "run" / "latest").write_text("step_8\n")
    torch.testing.assert_close(logits(tmp_path / "run"), logits(both_layouts[layout]), atol=0, rtol=0)
    (tmp_path / "run" / "latest").write_text("step_9")
    told = error_line(lambda: load_model(tmp_path / "run"))
    assert told == f"{tmp_path / 'run' / 'step_9'}: not found, but {tmp_path / 'run' / 'latest'} names it"


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_is_no_model(beside: bool, llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(llama(), tmp_path / "adapter") if beside else tmp_path
    (folder / "adapter_config.json").write_text("{}")
    for read in (load_model, lambda path: hg_to_pp(path, tmp_path / "layers")):
        told = error_line(partial(read, folder))
        assert f"{folder}: an adapter (adapter_config.json), no whole model; merge it" in told


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "of-wrong-fields": lambda manifest: manifest.update(colour={}),
    "empty": lambda manifest: manifest.clear(),
    "of-wrong-kind": lambda manifest: manifest.update(files=[]),
    "with-weights-outside": lambda manifest: manifest["files"].update(
        {"../a.safetensors": manifest["files"].pop(SHARD)}
    ),
    "with-side-files-outside": lambda manifest: manifest["side_files"].append("../bad/config.json"),
    "without-a-weight": lambda manifest: manifest["files"][SHARD].pop(),
    "with-a-weight-twice": lambda manifest: manifest["files"][SHARD].append(QUERY),
    "with-side-files-in-a-folder": lambda manifest: manifest["side_files"].append("additional_chat_templates/../x"),
    "with-a-file-above": lambda manifest: manifest["side_files"].append(".."),
    "with-an-unknown-weight": lambda manifest: manifest["files"][SHARD].append("model.layers.9.x"),
    "with-an-unknown-dtype": lambda manifest: manifest["dtypes"].update({QUERY: "F99"}),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_damaged_manifest_is_told_in_one_line(both_layouts: dict[str, Path], name: str, tmp_path: Path) -> None:
    folder = copy_of(both_layouts["pipeline"], tmp_path / "bad")
    manifest = json.loads((folder / "pipetune.json").read_text())
    MANIFESTS[name](manifest)
    (folder / "pipetune.json").write_text(json.dumps(manifest))
    assert str(folder / "pipetune.json") in error_line(lambda: pp_to_hg(folder, tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [folder]


def test_one_tensor_in_two_files_without_an_index_is_refused(llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(llama(), tmp_path / "twice")
    tensors = joined(read_weights(folder))
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    others = {name: tensor for name, tensor in tensors.items() if name != QUERY}
    write_weights(folder, {names[0]: others, names[1]: {QUERY: tensors[QUERY]}}, index=False)
    torch.testing.assert_close(logits(folder), logits(llama()), atol=0, rtol=0)
    write_weights(folder, {names[0]: tensors, names[1]: {QUERY: tensors[QUERY] + 1}}, index=False)
    told = error_line(lambda: load_model(folder))
    assert all(name in told for name in (*names, QUERY))


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "below/outside.safetensors", "..", ""])
def test_index_that_leads_out_of_the_folder_is_refused(place: str, llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(llama(), tmp_path / "folder")
    write_weights(folder, {SHARD: joined(read_weights(folder))}, index=True)
    path = folder / SAFETENSORS_INDEX
    path.write_text(path.read_text().replace(SHARD, place, 1))
    assert str(path) in error_line(lambda: load_model(folder))


@pytest.mark.parametrize("named", ["../elsewhere", "/etc", "..", "a/b", "", "step\0", b"\xff\xfe"])
def test_latest_names_a_folder_of_the_run_and_nothing_else(named: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "latest").write_bytes(named.encode() if isinstance(named, str) else named)
    assert str(tmp_path / "run" / "latest") in error_line(lambda: load_model(tmp_path / "run"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_link_out_of_the_folder_is_not_copied_by_content(
    both_layouts: dict[str, Path], layout: str, tmp_path: Path
) -> None:
    folder = copy_of(both_layouts[layout], tmp_path / "folder")
    (tmp_path / "secret").write_text("secret")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    told = error_line(lambda: CONVERTERS[layout](folder, tmp_path / "out"))
    assert str(folder / "tokenizer.json") in told
    assert "link" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_of_huggingfaces_cache_are_followed(both_layouts: dict[str, Path], layout: str, tmp_path: Path) -> None:
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

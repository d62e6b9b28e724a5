"""Shows that layers export wherever they came from (files of 2023, another tool, a run), in any dtype and division."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from models import load_model
from models.api import read_spec
from models.checkpoint.side_files import copy_side_files
from models.conversion import to_huggingface as export
from models.conversion import to_pipeline as converting
from models.conversion.to_huggingface import Export, ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from tests.models.command_line import convert
from tests.models.helpers import (
    LAYOUTS,
    SAFETENSORS_INDEX,
    assert_round_trip,
    assert_same_bits,
    change_weights,
    copy_of,
    error_line,
    joined,
    oracle,
    random_ids,
    read_config,
    read_weights,
    side_files,
    write_weights,
)

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"


@pytest.fixture
def llama_of_2023(llama: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint with the rotary buffers that transformers stored until 4.31, of another dtype than the weights."""
    folder = copy_of(llama(torch.float16, "sharded", False), tmp_path / "of-2023")
    files = read_weights(folder)
    for number in range(2):
        buffer = torch.rand(8, generator=torch.Generator().manual_seed(number))
        files[list(files)[number]][f"model.layers.{number}.self_attn.rotary_emb.inv_freq"] = buffer
    write_weights(folder, files)
    return folder


@pytest.fixture
def llama_of_two_templates(llama: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer has a template of its own for dialogues with tools."""
    folder = copy_of(llama(), tmp_path / "two-templates")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder)
    assert (folder / TOOL_TEMPLATE).is_file()
    return folder


def assert_same_model(found: Path, expected: Path, dtype: torch.dtype = torch.float32) -> None:
    """Transformers loads the same weights from both folders."""
    assert_same_bits(oracle(found, dtype).state_dict(), oracle(expected, dtype).state_dict())


def assert_indexed(folder: Path) -> None:
    """Index and files of a sharded folder fit each other."""
    files = read_weights(folder)
    index = json.loads((folder / SAFETENSORS_INDEX).read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in joined(files).values())


def test_rotary_buffers_of_old_llama_files_come_back(llama_of_2023: Path, tmp_path: Path) -> None:
    exported = assert_round_trip(llama_of_2023, tmp_path)
    assert any(name.endswith("rotary_emb.inv_freq") for name in joined(read_weights(exported)))
    ids = random_ids(1, 8)
    torch.testing.assert_close(load_model(tmp_path / "layers")(ids), load_model(llama_of_2023)(ids), atol=0, rtol=0)


def test_old_llama_layers_without_a_manifest_still_export(llama_of_2023: Path, tmp_path: Path) -> None:
    hg_to_pp(llama_of_2023, tmp_path / "layers")
    (tmp_path / "layers" / "pipetune.json").unlink()
    pp_to_hg(tmp_path / "layers", tmp_path / "exported")
    assert_same_model(tmp_path / "exported", llama_of_2023, torch.float16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("most", [export.MAX_SHARD_BYTES, 60_000])
def test_layers_of_another_tool_export(
    llama: Callable[..., Path], tied: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = llama(torch.bfloat16, "single", tied)
    hg_to_pp(folder, tmp_path / "layers")
    (tmp_path / "layers" / "pipetune.json").unlink()
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", most)
    pp_to_hg(tmp_path / "layers", tmp_path / "exported")

    files = read_weights(tmp_path / "exported")
    assert (len(files) > 1) == (most == 60_000)
    assert all(len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= most for tensors in files.values())
    assert_same_bits(joined(files), read_weights(folder)["model.safetensors"])
    assert side_files(tmp_path / "exported") == side_files(folder)
    assert_same_model(tmp_path / "exported", folder, torch.bfloat16)


def saved_by_a_run(original: Path, layout: str, workspace: Path) -> Path:
    """The checkpoint of a run that began with a folder of either layout, and added 1 to every weight."""
    hg_to_pp(original, workspace / "layers")
    saved = workspace / "saved"
    saved.mkdir()
    for path in (workspace / "layers").glob("layer_*"):
        state: dict[str, Tensor] = torch.load(path, weights_only=True)
        torch.save({name: tensor + 1 for name, tensor in state.items()}, saved / path.name)
    source = original if layout == "huggingface" else workspace / "layers"
    copy_side_files(source, saved, read_spec(source))
    assert all(path.is_file() for path in saved.iterdir()), "a run's checkpoint has no folders"
    return saved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trained_layers_export_like_the_original(llama_of_2023: Path, layout: str, tmp_path: Path) -> None:
    pp_to_hg(saved_by_a_run(llama_of_2023, layout, tmp_path), tmp_path / "exported")
    exported = read_weights(tmp_path / "exported")
    for file, tensors in read_weights(llama_of_2023).items():
        trained = {name: tensor if "inv_freq" in name else tensor + 1 for name, tensor in tensors.items()}
        assert_same_bits(exported[file], trained)
    assert side_files(tmp_path / "exported") == side_files(llama_of_2023)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_templates_in_a_folder_come_back_from_a_run(
    llama_of_two_templates: Path, layout: str, manifest: bool, tmp_path: Path
) -> None:
    """What is saved from scratch has no manifest."""
    saved = saved_by_a_run(llama_of_two_templates, layout, tmp_path)
    if not manifest:
        (saved / "pipetune.json").unlink()
    pp_to_hg(saved, tmp_path / "exported")
    assert side_files(tmp_path / "exported") == side_files(llama_of_two_templates)


def test_templates_in_a_folder_of_their_own_come_back(llama_of_two_templates: Path, tmp_path: Path) -> None:
    assert_round_trip(llama_of_two_templates, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path / "layers").chat_template["tool_use"] == "{{ tools }}"


def test_a_folder_of_templates_that_is_a_link_is_not_copied(llama_of_two_templates: Path, tmp_path: Path) -> None:
    folder = (llama_of_two_templates / TOOL_TEMPLATE).parent
    folder.rename(tmp_path / "secrets")
    folder.symlink_to(tmp_path / "secrets")
    with mock.patch.object(converting, "_write_layer", side_effect=AssertionError("found after hours")):
        assert "link" in error_line(lambda: hg_to_pp(llama_of_two_templates, tmp_path / "layers"))


def test_numbers_that_a_dtype_cannot_hold_are_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint("llama")
    change_weights(folder, lambda tensors: tensors["model.norm.weight"][3].fill_(1e6))
    hg_to_pp(folder, tmp_path / "layers")
    code, lines = convert("pp_to_hg", tmp_path / "layers", tmp_path / "cast", "--dtype", "fp16")
    assert code == 2 and "model.norm.weight: holds numbers that are too large for float16" in lines[-1]
    assert convert("pp_to_hg", tmp_path / "layers", tmp_path / "cast", "--dtype", "bf16") == (0, [])


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_dtype_casts_the_weights_and_says_so(llama_of_2023: Path, name: str, key: str, tmp_path: Path) -> None:
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    fields = read_config(llama_of_2023)
    fields[key] = fields.pop("dtype")
    (llama_of_2023 / "config.json").write_text(json.dumps(fields))
    hg_to_pp(llama_of_2023, tmp_path / "layers")
    assert convert("pp_to_hg", tmp_path / "layers", tmp_path / "cast", "--dtype", name, "--verify") == (0, [])

    found, original = read_weights(tmp_path / "cast"), read_weights(llama_of_2023)
    assert found.keys() == original.keys()
    for file, tensors in original.items():
        expected = {n: tensor if n.endswith("inv_freq") else tensor.to(dtype) for n, tensor in tensors.items()}
        assert_same_bits(found[file], expected)
    assert read_config(tmp_path / "cast") == fields | {key: str(dtype).removeprefix("torch.")}
    config = {"config.json": (tmp_path / "cast" / "config.json").read_bytes()}
    assert side_files(tmp_path / "cast") == side_files(llama_of_2023) | config
    assert oracle(tmp_path / "cast", dtype).dtype == dtype


@pytest.mark.parametrize(("size", "most"), [("60KB", 60_000), ("60kib", 61_440), ("0.1MB", 100_000), ("1GB", 10**9)])
@pytest.mark.parametrize("division", ["single", "sharded"])
def test_max_shard_size_divides_anew(
    llama: Callable[..., Path], division: str, size: str, most: int, tmp_path: Path
) -> None:
    folder, out = llama(torch.float32, division, True), tmp_path / "out"
    hg_to_pp(folder, tmp_path / "layers")
    assert convert("pp_to_hg", tmp_path / "layers", out, "--max-shard-size", size) == (0, [])

    files = read_weights(out)
    sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in files.items()}
    assert all(size <= most or len(files[file]) == 1 for file, size in sizes.items())
    assert any(size > most for size in sizes.values()) == (most < 131_072)  # the embedding alone
    for file, following in pairwise(files):
        assert sizes[file] + next(iter(files[following].values())).nbytes > most  # no file is smaller than need be
    assert_same_bits(joined(files), joined(read_weights(folder)))
    assert side_files(out) == side_files(folder)
    if most < 10**9:
        count = len(files)
        assert list(files) == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        assert_indexed(out)
    else:
        assert list(files) == ["model.safetensors"] and not (out / SAFETENSORS_INDEX).exists()
    assert_same_model(out, folder)


@pytest.mark.parametrize("size", ["", "0GB", "-5GB", "5", "GB", "many", "nan", "5 potatoes"])
def test_what_is_no_shard_size_is_refused(both_layouts: dict[str, Path], size: str, tmp_path: Path) -> None:
    code, lines = convert("pp_to_hg", both_layouts["pipeline"], tmp_path / "out", f"--max-shard-size={size}")
    assert code == 2
    assert all(f in lines[-1] for f in ("error: ", "--max-shard-size", repr(size), "expected a size such as 5GB"))
    assert list(tmp_path.iterdir()) == []


# Each writer's layers, of four: two blocks between embedding and head.
WRITERS: dict[str, list[Sequence[int]]] = {
    "two": [range(3), range(3, 4)],
    "one-without-layers": [range(2), range(2, 2), range(2, 4)],
    "in-turn": [(0, 2), (1, 3)],
    "one-each": [(0,), (1,), (2,), (3,)],
}


def export_by(writers: list[Sequence[int]], layers: Path, target: Path, options: ExportOptions) -> list[Export]:
    """What the ranks of a run do, each with a plan of its own, the last one first."""
    target.mkdir()
    exports = [Export(layers, options, writers) for _ in writers]
    for writer in reversed(range(len(writers))):
        exports[writer].write_weights(target, writer)
    exports[0].write_side_files(target)
    return exports


@pytest.mark.parametrize("writers", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("division", ["single", "sharded"])
def test_several_writers_give_the_tensors_of_one(
    llama: Callable[..., Path], division: str, writers: list[Sequence[int]], tmp_path: Path
) -> None:
    folder, out = llama(torch.bfloat16, division, True), tmp_path / "out"
    hg_to_pp(folder, tmp_path / "layers")
    exports = export_by(writers, tmp_path / "layers", out, ExportOptions())
    assert all(export.files == exports[0].files for export in exports)
    files = read_weights(out)
    assert all(len({exports[0].writer_of[name] for name in tensors}) == 1 for tensors in files.values())
    assert_same_bits(joined(files), joined(read_weights(folder)))
    assert side_files(out) == side_files(folder)
    assert_indexed(out)
    assert_same_model(out, folder, torch.bfloat16)


def test_several_writers_cast_divide_and_carry_like_one(llama_of_2023: Path, tmp_path: Path) -> None:
    hg_to_pp(llama_of_2023, tmp_path / "layers")
    options = ExportOptions(dtype=torch.bfloat16, max_shard_bytes=60_000)
    pp_to_hg(tmp_path / "layers", tmp_path / "one", options=options)
    export_by(WRITERS["two"], tmp_path / "layers", tmp_path / "two", options)
    assert_same_bits(joined(read_weights(tmp_path / "two")), joined(read_weights(tmp_path / "one")))
    assert side_files(tmp_path / "two") == side_files(tmp_path / "one")

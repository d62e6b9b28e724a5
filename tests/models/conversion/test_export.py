"""Shows that layers export wherever they came from (files of 2023, another tool, a run), in any dtype and division."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copyfile
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
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


def test_rotary_buffers_of_old_llama_files_come_back(llama_of_2023: Path, tmp_path: Path) -> None:
    exported = assert_round_trip(llama_of_2023, tmp_path)
    assert any(name.endswith("rotary_emb.inv_freq") for name in joined(read_weights(exported)))
    ids = random_ids(1, 8)
    torch.testing.assert_close(load_model(tmp_path / "layers")(ids), load_model(llama_of_2023)(ids), atol=0, rtol=0)


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
    assert_same_bits(
        oracle(tmp_path / "exported", torch.bfloat16).state_dict(), oracle(folder, torch.bfloat16).state_dict()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trained_layers_with_the_side_files_export_like_the_original(
    llama_of_2023: Path, layout: str, tmp_path: Path
) -> None:
    hg_to_pp(llama_of_2023, tmp_path / "layers")
    (tmp_path / "trained").mkdir()
    for path in (tmp_path / "layers").glob("layer_*"):
        state: dict[str, Tensor] = torch.load(path, weights_only=True)
        torch.save({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "trained" / path.name)
    source = llama_of_2023 if layout == "huggingface" else tmp_path / "layers"
    copy_side_files(source, tmp_path / "trained", read_spec(source))
    pp_to_hg(tmp_path / "trained", tmp_path / "exported")

    exported = read_weights(tmp_path / "exported")
    for file, tensors in read_weights(llama_of_2023).items():
        trained = {name: tensor if "inv_freq" in name else tensor + 1 for name, tensor in tensors.items()}
        assert_same_bits(exported[file], trained)
    assert side_files(tmp_path / "exported") == side_files(llama_of_2023)


@pytest.fixture
def llama_of_two_templates(llama: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer has a template of its own for dialogues with tools."""
    folder = copy_of(llama(), tmp_path / "two-templates")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder)
    assert (folder / TOOL_TEMPLATE).is_file()
    return folder


def test_templates_in_a_folder_of_their_own_come_back(llama_of_two_templates: Path, tmp_path: Path) -> None:
    exported = assert_round_trip(llama_of_two_templates, tmp_path)
    wanted = AutoTokenizer.from_pretrained(llama_of_two_templates).chat_template
    assert wanted["tool_use"] == "{{ tools }}"
    for folder in (tmp_path / "layers", exported):
        assert AutoTokenizer.from_pretrained(folder).chat_template == wanted


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_templates_in_a_folder_come_back_from_a_run(
    llama_of_two_templates: Path, layout: str, manifest: bool, tmp_path: Path
) -> None:
    """A run's checkpoint has no folders; what is saved from scratch has no manifest."""
    hg_to_pp(llama_of_two_templates, tmp_path / "layers")
    (tmp_path / "saved").mkdir()
    for path in (tmp_path / "layers").glob("layer_*"):
        copyfile(path, tmp_path / "saved" / path.name)
    source = llama_of_two_templates if layout == "huggingface" else tmp_path / "layers"
    copy_side_files(source, tmp_path / "saved", read_spec(source))
    assert all(path.is_file() for path in (tmp_path / "saved").iterdir())
    if not manifest:
        (tmp_path / "saved" / "pipetune.json").unlink()
    pp_to_hg(tmp_path / "saved", tmp_path / "exported")
    assert side_files(tmp_path / "exported") == side_files(llama_of_two_templates)


def test_a_folder_of_templates_that_is_a_link_is_not_copied(llama_of_two_templates: Path, tmp_path: Path) -> None:
    folder = (llama_of_two_templates / TOOL_TEMPLATE).parent
    folder.rename(tmp_path / "secrets")
    folder.symlink_to(tmp_path / "secrets")
    with mock.patch.object(converting, "_write_layer", side_effect=AssertionError("found after hours")):
        assert "link" in error_line(lambda: hg_to_pp(llama_of_two_templates, tmp_path / "layers"))


def test_numbers_that_a_dtype_cannot_hold_are_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(make_checkpoint("llama"), tmp_path / "folder")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = 1e6
    save_file(weights, folder / "model.safetensors")
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

    found = read_weights(tmp_path / "cast")
    original = read_weights(llama_of_2023)
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
    folder = llama(torch.float32, division, True)
    hg_to_pp(folder, tmp_path / "layers")
    assert convert("pp_to_hg", tmp_path / "layers", tmp_path / "out", "--max-shard-size", size) == (0, [])

    files = read_weights(tmp_path / "out")
    sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in files.items()}
    assert all(size <= most or len(files[file]) == 1 for file, size in sizes.items())
    assert any(size > most for size in sizes.values()) == (most < 131_072)  # the embedding alone
    for file, following in zip(list(files)[:-1], list(files)[1:], strict=True):
        assert sizes[file] + next(iter(files[following].values())).nbytes > most  # no file is smaller than need be
    assert_same_bits(joined(files), joined(read_weights(folder)))
    assert side_files(tmp_path / "out") == side_files(folder)
    assert (tmp_path / "out" / SAFETENSORS_INDEX).exists() == (most < 10**9)
    if most < 10**9:
        count = len(files)
        assert list(files) == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        index = json.loads((tmp_path / "out" / SAFETENSORS_INDEX).read_text())
        assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
        assert index["metadata"]["total_size"] == sum(sizes.values())
    else:
        assert list(files) == ["model.safetensors"]
    assert_same_bits(oracle(tmp_path / "out").state_dict(), oracle(folder).state_dict())


@pytest.mark.parametrize("size", ["", "0GB", "-5GB", "5", "GB", "many", "nan", "5 potatoes"])
def test_shard_size_that_is_none_is_told(both_layouts: dict[str, Path], size: str, tmp_path: Path) -> None:
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
    folder = llama(torch.bfloat16, division, True)
    hg_to_pp(folder, tmp_path / "layers")
    exports = export_by(writers, tmp_path / "layers", tmp_path / "out", ExportOptions())

    assert all(export.files == exports[0].files for export in exports)
    files = read_weights(tmp_path / "out")
    assert_same_bits(joined(files), joined(read_weights(folder)))
    assert side_files(tmp_path / "out") == side_files(folder)
    for tensors in files.values():
        assert len({exports[0].writer_of[name] for name in tensors}) == 1
    index = json.loads((tmp_path / "out" / SAFETENSORS_INDEX).read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in joined(files).values())
    assert_same_bits(oracle(tmp_path / "out", torch.bfloat16).state_dict(), oracle(folder, torch.bfloat16).state_dict())


def test_several_writers_cast_divide_and_carry_like_one(llama_of_2023: Path, tmp_path: Path) -> None:
    hg_to_pp(llama_of_2023, tmp_path / "layers")
    options = ExportOptions(dtype=torch.bfloat16, max_shard_bytes=60_000)
    pp_to_hg(tmp_path / "layers", tmp_path / "one", options=options)
    export_by(WRITERS["two"], tmp_path / "layers", tmp_path / "two", options)
    assert_same_bits(joined(read_weights(tmp_path / "two")), joined(read_weights(tmp_path / "one")))
    assert side_files(tmp_path / "two") == side_files(tmp_path / "one")


def test_old_llama_layers_without_a_manifest_still_export(llama_of_2023: Path, tmp_path: Path) -> None:
    hg_to_pp(llama_of_2023, tmp_path / "layers")
    (tmp_path / "layers" / "pipetune.json").unlink()
    pp_to_hg(tmp_path / "layers", tmp_path / "exported")
    expected = oracle(llama_of_2023, torch.float16).state_dict()
    assert_same_bits(oracle(tmp_path / "exported", torch.float16).state_dict(), expected)

"""Shows that hg_to_pp then pp_to_hg gives a HuggingFace folder back bit for bit, whatever it was written by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import load_model
from models.checkpoint import convert
from models.checkpoint.convert import copy_side_files, hg_to_pp, pp_to_hg
from tests.models.helpers import (
    SAFETENSORS_INDEX,
    WeightFiles,
    assert_same_bits,
    contents,
    copy_of,
    oracle,
    random_ids,
    read_weights,
    run_convert_model,
    write_weights,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHARDED = {"single": None, "sharded": {"max_shard_size": "60KB"}}
WEIGHTS = {".safetensors", ".bin", ".pt"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def renamed(files: WeightFiles) -> WeightFiles:
    """What .bin files are called as safetensors."""
    return {name.replace("pytorch_model", "model").replace(".bin", ".safetensors"): t for name, t in files.items()}


def as_bin(files: WeightFiles) -> WeightFiles:
    return {name.replace("model", "pytorch_model").replace(".safetensors", ".bin"): t for name, t in files.items()}


def side_files(folder: Path) -> dict[str, bytes]:
    """Everything but weights and their index."""
    found = contents(folder)
    return {n: data for n, data in found.items() if Path(n).suffix not in WEIGHTS and not n.endswith(".index.json")}


def put_special_values(files: WeightFiles) -> None:
    """Bits that a careless copy through another dtype or comparison would lose."""
    for tensors in files.values():
        for name, tensor in tensors.items():
            if name == EMBEDDING:
                tensor[0, :5] = torch.tensor([float("nan"), float("inf"), -0.0, 6e-8, -6e-8], dtype=tensor.dtype)


def assert_round_trip(folder: Path, workspace: Path) -> Path:
    """Convert there and back and compare everything; gives the exported folder."""
    original = read_weights(folder)
    hg_to_pp(folder, workspace / "layers")
    pp_to_hg(workspace / "layers", workspace / "exported")
    exported = read_weights(workspace / "exported")
    assert list(exported) == list(renamed(original))
    for file, tensors in renamed(original).items():
        assert_same_bits(exported[file], tensors)
    assert side_files(workspace / "exported") == side_files(folder)
    if len(original) > 1:
        index = json.loads((workspace / "exported" / SAFETENSORS_INDEX).read_text())
        assert index["weight_map"] == {name: file for file, tensors in exported.items() for name in tensors}
        assert index["metadata"]["total_size"] == sum(t.nbytes for file in exported.values() for t in file.values())
    return workspace / "exported"


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Callable[[str, str, bool], Path]:
    """A tiny llama by dtype, division into files and tying, made once each; not to be changed."""
    made: dict[tuple[str, str, bool], Path] = {}

    def get(dtype: str, division: str, tied: bool) -> Path:
        key = (dtype, division, tied)
        if key not in made:
            made[key] = make_checkpoint(
                save=SHARDED[division], dtype=DTYPES[dtype], tie_word_embeddings=tied, num_hidden_layers=2
            )
            (made[key] / "LICENSE").write_bytes("Lizenz für alle\r\n".encode())
        return made[key]

    return get


@pytest.mark.parametrize("tying", ["tied", "untied", "repeated"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("division", SHARDED)
def test_round_trip_is_exact(
    checkpoint: Callable[[str, str, bool], Path], division: str, suffix: str, dtype: str, tying: str, tmp_path: Path
) -> None:
    folder = copy_of(checkpoint(dtype, division, tying != "untied"), tmp_path / "original")
    files = read_weights(folder)
    put_special_values(files)
    tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
    assert (len(files) > 1) == (division == "sharded")
    assert (HEAD in tensors) == (tying == "untied")
    assert {tensor.dtype for tensor in tensors.values()} == {DTYPES[dtype]}
    if tying == "repeated":
        files[next(reversed(files))][HEAD] = tensors[EMBEDDING].clone()
    write_weights(folder, as_bin(files) if suffix == "bin" else files)

    exported = assert_round_trip(folder, tmp_path)
    pp_to_hg(tmp_path / "layers", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(exported)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("division", SHARDED)
def test_export_loads_in_plain_transformers(
    checkpoint: Callable[[str, str, bool], Path], division: str, tied: bool, tmp_path: Path
) -> None:
    folder = checkpoint("bf16", division, tied)
    exported = oracle(assert_round_trip(folder, tmp_path), torch.bfloat16).state_dict()
    assert_same_bits(exported, oracle(folder, torch.bfloat16).state_dict())


def test_shard_alone_with_its_index_loads_in_plain_transformers(
    checkpoint: Callable[[str, str, bool], Path], tmp_path: Path
) -> None:
    folder = copy_of(checkpoint("fp32", "single", False), tmp_path / "original")
    write_weights(folder, {"model-00001-of-00001.safetensors": read_weights(folder)["model.safetensors"]}, index=True)
    expected = oracle(folder).state_dict()
    assert_same_bits(oracle(assert_round_trip(folder, tmp_path)).state_dict(), expected)


@pytest.fixture
def llama_of_2023(checkpoint: Callable[[str, str, bool], Path], tmp_path: Path) -> Path:
    """A checkpoint with the rotary buffers that transformers stored until 4.31, of another dtype than the weights."""
    folder = copy_of(checkpoint("fp16", "sharded", False), tmp_path / "of-2023")
    files = read_weights(folder)
    for number in range(2):
        buffer = torch.rand(8, generator=torch.Generator().manual_seed(number))
        files[list(files)[number]][f"model.layers.{number}.self_attn.rotary_emb.inv_freq"] = buffer
    write_weights(folder, files)
    return folder


def test_rotary_buffers_of_old_llama_files_come_back(llama_of_2023: Path, tmp_path: Path) -> None:
    exported = assert_round_trip(llama_of_2023, tmp_path)
    assert any(name.endswith("rotary_emb.inv_freq") for file in read_weights(exported).values() for name in file)
    ids = random_ids(1, 8)
    torch.testing.assert_close(load_model(tmp_path / "layers")(ids), load_model(llama_of_2023)(ids), atol=0, rtol=0)


def test_old_llama_layers_without_a_manifest_still_export(llama_of_2023: Path, tmp_path: Path) -> None:
    hg_to_pp(llama_of_2023, tmp_path / "layers")
    (tmp_path / "layers" / "pipetune.json").unlink()
    pp_to_hg(tmp_path / "layers", tmp_path / "exported")
    expected = oracle(llama_of_2023, torch.float16).state_dict()
    assert_same_bits(oracle(tmp_path / "exported", torch.float16).state_dict(), expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("most", [convert.MAX_SHARD_BYTES, 60_000])
def test_layers_of_another_tool_export(
    checkpoint: Callable[[str, str, bool], Path], tied: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("bf16", "single", tied)
    hg_to_pp(folder, tmp_path / "layers")
    (tmp_path / "layers" / "pipetune.json").unlink()
    monkeypatch.setattr(convert, "MAX_SHARD_BYTES", most)
    pp_to_hg(tmp_path / "layers", tmp_path / "exported")

    files = read_weights(tmp_path / "exported")
    assert (len(files) > 1) == (most == 60_000)
    assert all(len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= most for tensors in files.values())
    assert_same_bits({n: t for file in files.values() for n, t in file.items()}, read_weights(folder)["model.safetensors"])
    assert side_files(tmp_path / "exported") == side_files(folder)
    assert_same_bits(oracle(tmp_path / "exported", torch.bfloat16).state_dict(), oracle(folder, torch.bfloat16).state_dict())


@pytest.mark.parametrize("layout", ["huggingface", "pipeline"])
def test_trained_layers_with_the_side_files_export_like_the_original(
    llama_of_2023: Path, layout: str, tmp_path: Path
) -> None:
    hg_to_pp(llama_of_2023, tmp_path / "layers")
    (tmp_path / "trained").mkdir()
    for path in (tmp_path / "layers").glob("layer_*"):
        state: dict[str, Tensor] = torch.load(path, weights_only=True)
        torch.save({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "trained" / path.name)
    copy_side_files(llama_of_2023 if layout == "huggingface" else tmp_path / "layers", tmp_path / "trained")
    pp_to_hg(tmp_path / "trained", tmp_path / "exported")

    exported = read_weights(tmp_path / "exported")
    for file, tensors in read_weights(llama_of_2023).items():
        trained = {name: tensor if "inv_freq" in name else tensor + 1 for name, tensor in tensors.items()}
        assert_same_bits(exported[file], trained)
    assert side_files(tmp_path / "exported") == side_files(llama_of_2023)


def test_round_trip_from_the_command_line(checkpoint: Callable[[str, str, bool], Path], tmp_path: Path) -> None:
    folder = checkpoint("bf16", "sharded", True)
    layers, exported = tmp_path / "new" / "layers", tmp_path / "exported"
    for words in (("hg_to_pp", folder, layers), ("pp_to_hg", layers, exported)):
        done = run_convert_model(words[0], "--input-path", words[1], "--save-path", words[2])
        assert done.returncode == 0, done.stderr
    assert contents(exported).keys() == contents(folder).keys()
    for file, tensors in read_weights(folder).items():
        assert_same_bits(read_weights(exported)[file], tensors)

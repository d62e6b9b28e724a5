"""Shows that hg_to_pp then pp_to_hg gives a HuggingFace folder back bit for bit, whatever it was written by."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer

from models import load_model
from models.conversion.to_huggingface import pp_to_hg
from tests.cases import tiered
from tests.data.chat.test_sentencepiece_folders import LLAMA, POINTER, TEXTS, folder_of
from tests.models.cases import CASES
from tests.models.helpers import (
    SHARDED,
    WeightFiles,
    assert_round_trip,
    assert_same_bits,
    contents,
    copy_of,
    joined,
    oracle,
    random_ids,
    read_weights,
    run_convert_model,
    write_weights,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STORED = tiered(product(("safetensors", "bin"), DTYPES), slow=["bin-fp32", "bin-bf16"])
FUSED = {  # what is one tensor in memory and several on disk, or the other way round
    "mixtral": ".0.block_sparse_moe.experts.",
    "chatglm": ".query_key_value.weight",
    "baichuan": ".W_pack.weight",
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def as_bin(files: WeightFiles) -> WeightFiles:
    return {name.replace("model", "pytorch_model").replace(".safetensors", ".bin"): t for name, t in files.items()}


def put_special_values(files: WeightFiles) -> None:
    """Bits that a careless copy through another dtype or comparison would lose."""
    for tensor in joined(files).values():
        values = torch.tensor([float("nan"), float("inf"), -0.0, 6e-8, -6e-8], dtype=tensor.dtype)
        tensor.view(-1)[:5] = values[: tensor.numel()]


def give_own_rotary_buffer(files: WeightFiles, model_type: str, dtype: torch.dtype) -> str:
    """Store rotary angles as the family's old files do, in another dtype than the weights; gives their name."""
    name = "transformer.rotary_pos_emb" if model_type == "chatglm" else "model.layers.1.self_attn.rotary_emb"
    name += ".inv_freq"
    holder = next((tensors for tensors in files.values() if name in tensors), files[next(reversed(files))])
    assert (model_type == "chatglm") == (name in holder)
    holder[name] = torch.rand(8).to(torch.float16 if dtype == torch.float32 else torch.float32)
    return name


def keep_the_head_only(files: WeightFiles) -> None:
    """Store a tied weight under its other name."""
    holder = next(tensors for tensors in files.values() if EMBEDDING in tensors)
    holder[HEAD] = holder.pop(EMBEDDING)


@pytest.mark.parametrize("tying", ["tied", "untied", "repeated", "head-only"])
@pytest.mark.parametrize(("suffix", "dtype"), STORED)
@pytest.mark.parametrize("division", SHARDED)
def test_round_trip_is_exact(
    llama: Callable[..., Path], division: str, suffix: str, dtype: str, tying: str, tmp_path: Path
) -> None:
    folder = copy_of(llama(DTYPES[dtype], division, tying != "untied"), tmp_path / "original")
    files = read_weights(folder)
    put_special_values(files)
    tensors = joined(files)
    assert (len(files) > 1) == (division == "sharded")
    assert (HEAD in tensors) == (tying == "untied")
    assert {tensor.dtype for tensor in tensors.values()} == {DTYPES[dtype]}
    if tying == "repeated":
        files[next(reversed(files))][HEAD] = tensors[EMBEDDING].clone()
    elif tying == "head-only":
        keep_the_head_only(files)
    write_weights(folder, as_bin(files) if suffix == "bin" else files)

    exported = assert_round_trip(folder, tmp_path)
    pp_to_hg(tmp_path / "layers", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(exported)


def test_a_tied_weight_may_be_stored_as_the_head_alone(llama: Callable[..., Path], tmp_path: Path) -> None:
    folder, ids = copy_of(llama(tied=True), tmp_path / "original"), random_ids(1, 8)
    files = read_weights(folder)
    keep_the_head_only(files)
    write_weights(folder, files)
    with torch.inference_mode():
        torch.testing.assert_close(load_model(folder)(ids), oracle(folder)(ids).logits)


@pytest.mark.parametrize("name", tiered(CASES, slow=["*13b"]))
def test_every_family_comes_back(name: str, make_case: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_case(name, SHARDED["sharded"], dtype=torch.bfloat16)
    assert len(read_weights(folder)) > 1
    assert_round_trip(folder, tmp_path)


@pytest.mark.parametrize(("suffix", "dtype"), STORED)
@pytest.mark.parametrize(
    "name", tiered(["mixtral", "chatglm3", "baichuan2-7b", "baichuan2-13b"], slow=["baichuan2-13b"])
)
def test_weights_that_are_cut_or_stacked_in_memory_come_back(
    name: str, suffix: str, dtype: str, make_case: Callable[..., Path], tmp_path: Path
) -> None:
    model_type = CASES[name].model_type
    folder = make_case(name, {"max_shard_size": "50KB"}, dtype=DTYPES[dtype])
    files = read_weights(folder)
    put_special_values(files)
    assert {tensor.dtype for tensor in joined(files).values()} == {DTYPES[dtype]}
    carried = give_own_rotary_buffer(files, model_type, DTYPES[dtype])
    parts = [{name for name in tensors if FUSED[model_type] in name} for tensors in files.values()]
    assert sum(map(bool, parts)) > 1  # one layer's experts, or the layers' projections, lie in several files
    write_weights(folder, as_bin(files) if suffix == "bin" else files)

    exported = assert_round_trip(folder, tmp_path)
    assert joined(read_weights(exported))[carried].dtype != DTYPES[dtype]
    pp_to_hg(tmp_path / "layers", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(exported)


def test_experts_of_different_dtypes_come_back(make_case: Callable[..., Path], tmp_path: Path) -> None:
    """In memory the experts of a layer are one tensor of one dtype."""
    folder = make_case("mixtral")
    files = read_weights(folder)
    for number, (name, tensor) in enumerate(files["model.safetensors"].items()):
        files["model.safetensors"][name] = tensor.to(list(DTYPES.values())[number % 3])
    write_weights(folder, files)
    assert_round_trip(folder, tmp_path)


def test_shard_alone_with_its_index_loads_in_plain_transformers(llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(llama(torch.float32, "single", False), tmp_path / "original")
    write_weights(folder, {"model-00001-of-00001.safetensors": read_weights(folder)["model.safetensors"]}, index=True)
    expected = oracle(folder).state_dict()
    assert_same_bits(oracle(assert_round_trip(folder, tmp_path)).state_dict(), expected)


@pytest.mark.slow
def test_an_export_that_no_run_wrote_has_the_models_ids(llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(llama(torch.float32, "single", False), tmp_path / "original")
    config = (folder / "config.json").read_bytes()
    folder_of(folder, LLAMA)
    (folder / "config.json").write_bytes(config)
    (folder / "tokenizer.json").unlink()
    layers, exported = tmp_path / "layers", tmp_path / "exported"
    for command, source, target in (("hg_to_pp", folder, layers), ("pp_to_hg", layers, exported)):
        done = run_convert_model(command, "--input-path", source, "--save-path", target)
        assert (done.returncode, done.stderr.count("warning")) == (0, 0), done.stderr
    model = sentencepiece.SentencePieceProcessor(model_file=str(exported / "tokenizer.model"))
    loaded = AutoTokenizer.from_pretrained(exported)
    assert [loaded.encode(text) for text in TEXTS] == [[1, *model.encode(text)] for text in TEXTS]
    (layers / "tokenizer.model").write_bytes(POINTER)
    done = run_convert_model("pp_to_hg", "--input-path", layers, "--save-path", exported, "--overwrite")
    assert done.returncode == 0 and "warning: no tokenizer.json is written: " in done.stderr
    assert not (exported / "tokenizer.json").exists()


def test_bloom_files_without_the_prefix_come_back_without_it(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, ids = make_checkpoint("bloom", num_hidden_layers=2, tie_word_embeddings=True), random_ids(1, 9)
    with_prefix = load_model(folder)(ids)
    short = {name.removeprefix("transformer."): tensor for name, tensor in joined(read_weights(folder)).items()}
    assert "h.0.input_layernorm.weight" in short
    write_weights(folder, {"model.safetensors": short})
    torch.testing.assert_close(load_model(folder)(ids), with_prefix, atol=0, rtol=0)
    assert_round_trip(folder, tmp_path)

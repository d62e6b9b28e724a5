"""Shows that `check` names what keeps transformers from loading a folder, and nothing of one that is whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

import convert_model
from models.adapters import Lora, Trained
from models.api import read_spec
from models.checkpoint.peft_names import PEFT_WEIGHTS
from models.conversion.check import check
from models.conversion.check_adapter import MERGE
from models.conversion.check_ahead import readers_of_ahead
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.errors import CheckpointError
from tests.conftest import ORIGINALS
from tests.models.adapters import save_adapter, save_run
from tests.models.cases import CASES
from tests.models.helpers import read_config, read_weights, write_weights
from tests.options.multi_token.folders import add_layers_ahead

Make = Callable[..., Path]


@pytest.fixture
def folder(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama", {"max_shard_size": "100KB"})


def assert_lacks(folder: Path, what: str) -> None:
    assert any(what in problem for problem in check(folder)), check(folder)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("baichuan-13b", "baichuan2-13b")])
def test_an_export_is_complete(name: str, make_case: Make, tmp_path: Path) -> None:
    hg_to_pp(make_case(name), tmp_path / "layers")
    code = read_config(tmp_path / "layers")["model_type"] in ORIGINALS
    pp_to_hg(tmp_path / "layers", tmp_path / "out", options=ExportOptions(layout="native" if code else "original"))
    assert check(tmp_path / "out") == []


def test_the_command_prints_a_line_for_each_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", ["convert_model.py", "check", "--input-path", str(folder)]):
        convert_model.main()
        assert capsys.readouterr().out == f"{folder}: complete\n"
        (folder / "tokenizer.json").rename(folder / "other.json")
        (folder / "model.safetensors.index.json").unlink()
        with pytest.raises(SystemExit, match=r"\A1\Z"):
            convert_model.main()
    index, tokenizer = capsys.readouterr().out.splitlines()
    assert index == f"{folder}: no index of its weight files"
    assert tokenizer.startswith(f"{folder}: the tokenizer does not load: ")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert_lacks(folder, "missing weights")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_names_that_transformers_does_not_look_for_are_reported(
    prefix: str, make_checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint("llama")
    files = read_weights(folder)
    write_weights(folder, {file: {prefix + name: t for name, t in tensors.items()} for file, tensors in files.items()})
    problem = f"the names of its weights begin with {prefix}model., which transformers does not look for"
    assert_lacks(folder, problem)
    hg_to_pp(folder, tmp_path / "layers")
    pp_to_hg(tmp_path / "layers", tmp_path / "out")
    assert problem in caplog.text


@pytest.mark.parametrize(("name", "remedy"), [("chatglm3", "--layout native"), ("baichuan2-13b", "has no class")])
def test_code_of_a_publisher_is_reported(name: str, remedy: str, make_case: Make) -> None:
    assert_lacks(make_case(name), remedy)


def test_pipeline_layers_are_refused(both_layouts: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="export it with pp_to_hg"):
        check(both_layouts["pipeline"])


FLAG = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\''
UNKNOWN = "looks for none under these names in a model of type"
YES, BY_FLAG, EAGLE = (
    "yes, by generate(..., use_mtp=True)",
    f"yes, with {FLAG}",
    "yes, with --speculative-algorithm EAGLE",
)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("glm4_moe-tiny", (YES, BY_FLAG, EAGLE)),
        ("qwen3_next-tiny", ("leaves them out", BY_FLAG, EAGLE)),
        ("qwen3_5-text-tiny", ("leaves them out", BY_FLAG, f"{UNKNOWN} qwen3_5_text")),
        ("ernie4_5_moe-tiny", ("leaves them out", BY_FLAG, EAGLE)),
    ],
)
def test_who_drafts_with_layers_ahead_is_said(name: str, said: tuple[str, ...], shared: Path) -> None:
    lines = [
        "layers that predict further ahead, for drafts: 1",
        *map(": ".join, zip(("transformers", "vLLM", "SGLang"), said, strict=True)),
    ]
    assert readers_of_ahead(shared / "golden" / "mtp" / name) == lines


def test_new_layers_that_no_server_looks_for_are_told(
    make_checkpoint: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=False)
    assert readers_of_ahead(folder) == []
    add_layers_ahead(folder, 2)
    with mock.patch.object(sys, "argv", ["convert_model.py", "check", "--input-path", str(folder)]):
        convert_model.main()
    said = ["complete", "layers that predict further ahead, for drafts: 2", "transformers: leaves them out"]
    said += [f"{name}: {UNKNOWN} llama" for name in ("vLLM", "SGLang")]
    assert capsys.readouterr().out.splitlines() == [f"{folder}: {line}" for line in said]


ALL_READ_IT = [f"{name}: yes" for name in ("peft and transformers", "vLLM", "SGLang", "llama.cpp")]
EACH_EXPERT = "looks for an adapter of each expert by itself"
DENSE_IN_PEFT = "peft and transformers: peft 0.21 takes the dense"
WIDE = {"hidden_size": 520, "num_attention_heads": 1, "head_dim": 520, "num_key_value_heads": 1}
DENSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("family", "changes", "lora", "lines"),
    [
        ("llama", {}, {}, ALL_READ_IT),
        ("llama", {}, {"r": 30}, ["peft and transformers: yes", "vLLM: yes, with --max-lora-rank 32", "SGLang: yes"]),
        ("llama", WIDE, {"r": 513, "targets": ("q_proj",)}, ["vLLM: takes ranks up to 512", "SGLang: yes", MERGE]),
        (
            "llama",
            {},
            {"rslora": True},
            ["vLLM: yes", "SGLang: scales by alpha / r", "llama.cpp: scales by", MERGE],
        ),
        (
            "llama",
            {},
            {"modules_to_save": ("lm_head",)},
            ["peft and transformers: yes", "vLLM: knows no mod", MERGE],
        ),
        ("mixtral", {}, {}, ["vLLM: reads experts only", f"SGLang: {EACH_EXPERT}", f"llama.cpp: {EACH_EXPERT}", MERGE]),
        ("mixtral", {}, {"experts": False}, ALL_READ_IT),
        ("qwen3_moe", DENSE, {}, [f"{DENSE_IN_PEFT} gate_proj, up_proj, down_proj for", MERGE]),
        ("qwen3_moe", DENSE, {"targets": ("q_proj", "down_proj")}, [f"{DENSE_IN_PEFT} down_proj for", MERGE]),
        ("qwen3_moe", DENSE, {"targets": ("q_proj",)}, ALL_READ_IT),
    ],
)
def test_an_adapter_is_whole_and_who_reads_it_is_said(
    family: str,
    changes: dict[str, Any],
    lora: dict[str, Any],
    lines: list[str],
    make_checkpoint: Make,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = make_checkpoint(family, tie_word_embeddings=False, **changes)
    adapter = save_adapter(read_spec(base).training(Trained(Lora(**{"r": 2, "alpha": 6} | lora))), base)
    capsys.readouterr()
    with mock.patch.object(sys, "argv", ["convert_model.py", "check", "--input-path", str(adapter)]):
        convert_model.main()
        whole, about, *found = [line.removeprefix(f"{adapter}: ") for line in capsys.readouterr().out.splitlines()]
        assert whole == "complete" and about.startswith("adapts ") and about.endswith(f" of {base}")
        assert [each for each in lines if not any(line.startswith(each) for line in found)] == []
        assert (MERGE in found) == (MERGE in lines)
        saved = load_file(adapter / PEFT_WEIGHTS)
        saved.popitem()
        save_file(saved, adapter / PEFT_WEIGHTS)
        with pytest.raises(SystemExit, match=r"\A1\Z"):
            convert_model.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert "expected all weights that this adapter trains" in line


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("q_proj",)])
def test_an_export_that_peft_reads_in_part_warns(
    targets: tuple[str, ...], make_checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_checkpoint("qwen3_moe", **DENSE)
    spec = read_spec(base).training(Trained(Lora(r=2, alpha=6, targets=targets)))
    run = save_run(spec, base)
    capsys.readouterr()
    pp_to_hg(run, tmp_path / "peft")
    exported, trained = load_file(tmp_path / "peft" / PEFT_WEIGHTS), map(spec.trained_names, range(spec.n_layers))
    assert len(exported) == sum(map(len, trained))
    warned = "warning: peft reads this adapter in part; serve it merged" in capsys.readouterr().err
    assert warned == ("down_proj" in targets)

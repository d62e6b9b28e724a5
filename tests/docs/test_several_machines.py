"""The figures of docs/several-machines.md are those of its own plans."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

import train_ds
from tests.docs.pages import blocks, commands, text_of

PAGE = "docs/several-machines.md"
FIGURE = re.compile(r"\d[\d,.]*")


@pytest.mark.slow
def test_the_table_says_what_the_plans_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (plans,) = (block for block in blocks("bash", pages=(PAGE,)) if "--plan" in block.text)
    rows = re.findall(r"^\| `(\S+)` \|(.*)\|$", text_of(PAGE), re.MULTILINE)
    for config, line, (name, row) in zip(blocks("yaml", pages=(PAGE,)), commands(plans.text), rows, strict=True):
        assert f"../llm/{name}" in config.before and f"../llm/{name}" in line
        Path(name).write_text(config.text, encoding="utf-8")
        words = shlex.split(line.replace(f"../llm/{name}", name))[2:]
        monkeypatch.setattr(sys, "argv", ["train_ds.py", *words, "save_path=run"])
        train_ds.main()
        printed = capsys.readouterr().out
        assert "planned by the known shape of" in printed and "memory: fits" in printed
        assert [figure for figure in FIGURE.findall(row) if figure not in printed] == [], printed

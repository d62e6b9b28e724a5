"""A recorded terminal shows what the command printed, needs nothing from elsewhere, and gives away no path."""

from __future__ import annotations

import ast
import html
import re
import sys
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import recording
from tests.conftest import ROOT

PRINTS = """
import pathlib, sys
print("step 1/6  loss \033[32m2.51\033[0m <ok>")
print(pathlib.Path.home() / "x", file=sys.stderr)
"""


def lines_in(picture: Path) -> list[str]:
    """The lines of text in a picture, but for blank ones."""
    rows: dict[str, str] = {}
    for row, text in re.findall(r'<text [^>]*y="([\d.]+)"[^>]*>([^<]*)</text>', picture.read_text(encoding="utf-8")):
        rows[row] = rows.get(row, "") + html.unescape(text).replace("\xa0", " ")
    return [text.rstrip() for text in rows.values() if text.strip()]


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[int, Path]:
    (folder / "script.py").write_text(script)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["recording", "run.svg", "script.py", "--steps", "6"])
    return recording.main(), folder / "run.svg"


def test_a_picture_shows_the_command_and_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, picture = recorded(tmp_path, monkeypatch, PRINTS)
    assert code == 0
    assert lines_in(picture)[-3:] == ["$ python script.py --steps 6", "step 1/6  loss 2.51 <ok>", "~/x"]


REDRAWS = """
from rich.console import Console
from rich.live import Live
console = Console()
with Live(console=console, auto_refresh=False) as live:
    for step in (1, 2, 3):
        console.print(f"saved: step {step}") if step == 2 else None
        live.update(f"step {step}/3\\n[red]loss {step / 2}[/red]", refresh=True)
print("25%", end="\\r")
print("100%")
"""


def test_what_is_redrawn_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a terminal: what is printed meanwhile stands above it."""
    code, picture = recorded(tmp_path, monkeypatch, REDRAWS)
    assert code == 0
    shown = lines_in(picture)
    assert shown[shown.index("$ python script.py --steps 6") + 1 :] == ["saved: step 2", "step 3/3", "loss 1.5", "100%"]


@pytest.mark.parametrize("addition", ["print(pathlib.Path.cwd() / 'run')", "sys.exit(3)"])
def test_a_path_or_a_failure_makes_no_picture(addition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, picture = recorded(tmp_path, monkeypatch, PRINTS + addition)
    assert code == 1
    assert not picture.exists()


def test_the_readmes_recording_is_one_file() -> None:
    picture = ROOT / "docs" / "pictures" / "run.svg"
    text = picture.read_text(encoding="utf-8")
    assert re.findall(r"https?://\S+", text.replace("http://www.w3.org/2000/svg", "")) == ["https://www.textualize.io"]
    assert "$ python train_ds.py" in "\n".join(lines_in(picture))


PRODUCT = ("common", "data", "models", "options", "training")


def literals() -> str:
    """What stands in the strings of the product's code, docstrings left out."""
    found: list[str] = []
    for path in chain.from_iterable((ROOT / package).rglob("*.py") for package in PRODUCT):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = None
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_readmes_recording_has_the_words_of_today() -> None:
    """Each label before a colon, and three words in a row of each phrase: others may come of numbers or names."""
    code, lines = literals(), lines_in(ROOT / "docs" / "pictures" / "run.svg")[2:]
    labels = [found[1] for line in lines if (found := re.match(r"([a-z][a-z -]*):", line))]
    assert {"start", "model", "saved", "next"} <= set(labels)
    assert [label for label in labels if f"{label}:" not in code and f"\n{label}\n" not in code] == []

    for line in lines:
        for phrase in re.findall(r"[A-Za-z-]+(?: [A-Za-z-]+){3,}", line):
            words = phrase.split()
            threes = [" ".join(words[begin : begin + 3]) for begin in range(len(words) - 2)]
            assert any(three in code for three in threes), phrase

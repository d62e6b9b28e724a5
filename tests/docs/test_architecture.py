"""docs/architecture.md names files that exist, and its reading path is one for an evening."""

from __future__ import annotations

import re

from tests.conftest import ROOT

FILES, LINES = 30, 4350  # lines with words: blank ones, between steps, cost a reader nothing
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_is_named_is_there() -> None:
    named = re.findall(r"`((?:common|data|models|options|training)/[\w/]+(?:\.py|/))`", TEXT)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_room_is_named() -> None:
    for wing in ("common", "data", "models", "options", "training"):
        rooms = [path.parent.name for path in (ROOT / wing).glob("*/__init__.py")]
        assert [room for room in rooms if f"`{room}/`" not in TEXT] == []


def test_tests_mirror_the_packages() -> None:
    """Each folder of tests/ has the tests of the package with its name, but for those that architecture.md names."""
    others = {"cluster", "docs", "pretend", "workers"}
    folders = [path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").glob("**/__init__.py")]
    named = next(line for line in TEXT.splitlines() if line.startswith("tests/ "))
    assert all(f"{name}/" in named for name in others)
    lacking = {folder.as_posix() for folder in folders if not (ROOT / folder / "__init__.py").exists()}
    assert lacking - {"."} <= others


def test_reading_path_fits_an_evening() -> None:
    path = re.findall(r"`([\w/]+\.py)`", TEXT.partition("## An evening's reading")[2])
    assert 0 < len(path) <= FILES
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in path]
    assert sum(len(re.findall(r"^.*\S", text, re.MULTILINE)) for text in texts) <= LINES

"""README.md and README_CN.md say the same: the same headings in the same order, the same commands, the same figures."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.docs.pages import READMES, Block, blocks, headings, links, text_of, without_blocks

LINES = 280  # so that a reader comes to the end
ENGLISH, CHINESE = READMES
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)*(?!\w)", re.ASCII)


def without_comments(block: Block) -> str:
    return re.sub(r"(^|\s)#.*", "", block.text).strip()


def figures(page: str) -> list[Counter[str]]:
    """The numbers of each section, in text, tables and inline code."""
    text = re.sub(r"\]\([^)]*\)", "]", without_blocks(page))
    sections = re.split(r"^#+ .+$", text, flags=re.MULTILINE)[1:]
    return [Counter(FIGURE.findall(each)) for each in sections]


@pytest.mark.parametrize("page", READMES)
def test_short_enough_to_be_read(page: str) -> None:
    assert len(text_of(page).splitlines()) <= LINES


def test_the_same_headings() -> None:
    assert [level for level, _ in headings(ENGLISH)] == [level for level, _ in headings(CHINESE)]
    assert all(re.search(r"[\u4e00-\u9fff]|^Pipetune$", text) for _, text in headings(CHINESE))


def test_the_same_blocks() -> None:
    mine, theirs = blocks(pages=(ENGLISH,)), blocks(pages=(CHINESE,))
    assert [(each.language, without_comments(each)) for each in mine] == [
        (each.language, without_comments(each)) for each in theirs
    ]


def test_the_same_commands_and_files_in_the_text() -> None:
    def code(page: str) -> set[str]:
        return {each for each in re.findall(r"`([^`]+)`", without_blocks(page)) if each.isascii()}

    assert code(ENGLISH) == code(CHINESE)


def test_the_same_figures() -> None:
    for (_, heading), mine, theirs in zip(headings(ENGLISH), figures(ENGLISH), figures(CHINESE), strict=True):
        assert mine == theirs, heading


def test_the_same_links() -> None:
    def pages(page: str) -> set[str]:
        return {link.partition("#")[0].replace("_CN.md", ".md") for link in links(page)} - {"README.md"}

    assert pages(ENGLISH) == pages(CHINESE)

"""A page and its Chinese version say the same: headings, blocks, commands, figures and links, in the same order."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.docs.pages import PAGES, PAIRS, READMES, Block, blocks, headings, links, text_of, without_blocks

LINES = 280  # of a README, so that a reader comes to the end
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)*(?!\w)", re.ASCII)
HAN = re.compile(r"[\u4e00-\u9fff]")
both = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[english for english, _ in PAIRS])


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


def test_the_pages_of_both_languages_are_found() -> None:
    assert {READMES, ("docs/cluster.md", "docs/cluster_CN.md"), ("docs/data.md", "docs/data_CN.md")} <= set(PAIRS)
    assert {chinese for _, chinese in PAIRS} == {page for page in PAGES if page.endswith("_CN.md")}


@both
def test_each_leads_to_the_other(english: str, chinese: str) -> None:
    for page, other in ((english, chinese), (chinese, english)):
        assert re.search(rf"^\[(中文(说明)?|English)\]\({other.rpartition('/')[2]}\)$", text_of(page), re.MULTILINE)


@both
def test_the_same_headings(english: str, chinese: str) -> None:
    mine, theirs = headings(english), headings(chinese)
    assert [level for level, _ in mine] == [level for level, _ in theirs]
    # A name stays what it is.
    kept = {text for _, text in mine if len(text.split()) <= 2}
    assert [text for _, text in theirs if not HAN.search(text) and text not in kept] == []


@both
def test_the_same_blocks(english: str, chinese: str) -> None:
    mine, theirs = blocks(pages=(english,)), blocks(pages=(chinese,))
    assert [(each.language, each.needs, without_comments(each)) for each in mine] == [
        (each.language, each.needs, without_comments(each)) for each in theirs
    ]


@both
def test_the_same_commands_and_files_in_the_text(english: str, chinese: str) -> None:
    def code(page: str) -> set[str]:
        found = (" ".join(each.split()) for each in re.findall(r"`([^`]+)`", without_blocks(page)))
        return {each for each in found if each.isascii()}

    assert code(english) == code(chinese)


@both
def test_the_same_figures(english: str, chinese: str) -> None:
    for (_, heading), mine, theirs in zip(headings(english), figures(english), figures(chinese), strict=True):
        assert mine == theirs, heading


@both
def test_the_same_links(english: str, chinese: str) -> None:
    def pages(page: str) -> Counter[str]:
        return Counter(link.partition("#")[0].replace("_CN.md", ".md") for link in links(page))

    assert pages(english) == pages(chinese)


@both
def test_a_chinese_page_leads_to_chinese_pages(english: str, chinese: str) -> None:
    """Where there are any, but for the switch at its top."""
    folder = english.rpartition("/")[0]
    switches = {english.rpartition("/")[2]}
    known = {each for each, _ in PAIRS}
    found = {link.partition("#")[0] for link in links(chinese)} - switches
    assert [link for link in found if resolved(folder, link) in known] == []


def resolved(folder: str, link: str) -> str:
    """The page that a link from this folder leads to, seen from the repository."""
    return link.removeprefix("../") if link.startswith("../") else f"{folder}/{link}".removeprefix("/")

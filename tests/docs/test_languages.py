"""A page and its Chinese version agree: headings, blocks, commands, figures and links, in the same order."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import yaml

from tests.conftest import ROOT
from tests.docs.pages import PAGES, PAIRS, READMES, Block, blocks, headings, links, text_of, without_blocks

LINES = 280  # of a README, so that a reader reaches the end
SHORTER = {"docs/auto.md", "docs/demo.md", "docs/models.md"}  # pages whose Chinese version may leave things out
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)*(?!\w)", re.ASCII)
WORD = re.compile(r"(?<![\w.:/=-])[A-Za-z]{2,}(?![\w.:/=-])")  # of a sentence, not of a key, a path or an option
MOST_WORDS, MOST_NAMES = 4, 2  # that stay what they are: in a Chinese comment, and in one without a Chinese word
HAN = re.compile(r"[\u4e00-\u9fff]")
every = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[english for english, _ in PAIRS])
TEMPLATE = "configs/ds_config_pp.yml"


def shown(page: str) -> list[tuple[str, str, str]]:
    """The blocks without their comments, and pictures without their words."""

    def without_comments(block: Block) -> str:
        if block.language == "mermaid":
            return re.sub(r'"[^"]*"', "", block.text)
        return re.sub(r"(^|\s)#.*", "", block.text).strip()

    return [(each.language, each.needs, without_comments(each)) for each in blocks(pages=(page,))]


def figures(page: str) -> list[Counter[str]]:
    """The numbers of each section, in text, tables and inline code."""
    text = re.sub(r"\]\([^)]*\)", "]", without_blocks(page))
    sections = re.split(r"^#+ .+$", text, flags=re.MULTILINE)[1:]
    return [Counter(FIGURE.findall(each)) for each in sections]


def code(page: str) -> set[str]:
    """The inline code, but for Chinese words."""
    found = (" ".join(each.split()) for each in re.findall(r"`([^`]+)`", without_blocks(page)))
    return {each for each in found if each.isascii()}


def targets(page: str) -> Counter[str]:
    return Counter(link.partition("#")[0].replace("_CN.md", ".md") for link in links(page))


@pytest.mark.parametrize("page", READMES)
def test_short_enough_to_be_read(page: str) -> None:
    assert len(text_of(page).splitlines()) <= LINES


def test_the_pages_of_both_languages_are_found() -> None:
    assert {READMES, ("docs/cluster.md", "docs/cluster_CN.md"), ("docs/data.md", "docs/data_CN.md")} <= set(PAIRS)
    assert {chinese for _, chinese in PAIRS} == {page for page in PAGES if page.endswith("_CN.md")}


@every
def test_each_leads_to_the_other(english: str, chinese: str) -> None:
    for page, other in ((english, chinese), (chinese, english)):
        assert re.search(rf"^\[(中文(说明)?|English)\]\({other.rpartition('/')[2]}\)$", text_of(page), re.MULTILINE)


@every
def test_the_same_headings(english: str, chinese: str) -> None:
    mine, theirs = headings(english), headings(chinese)
    if english not in SHORTER:
        assert [level for level, _ in mine] == [level for level, _ in theirs]
    kept = {text for _, text in mine if len(text.split()) <= 2}  # a name stays what it is
    assert [text for _, text in theirs if not HAN.search(text) and text not in kept] == []


@every
def test_the_same_content(english: str, chinese: str) -> None:
    if english in SHORTER:
        assert [each for each in shown(chinese) if each not in shown(english)] == []
        assert code(chinese) - code(english) == set()
        assert sum(figures(chinese), Counter()) - sum(figures(english), Counter()) == Counter()
        assert set(targets(chinese) - targets(english)) <= {english.rpartition("/")[2]}
        return
    assert shown(english) == shown(chinese)
    assert code(english) == code(chinese)
    for (_, heading), mine, theirs in zip(headings(english), figures(english), figures(chinese), strict=True):
        assert mine == theirs, heading
    assert targets(english) == targets(chinese)


@every
def test_a_chinese_page_leads_to_chinese_pages(english: str, chinese: str) -> None:
    """Where there are any, but for the switch at its top, and what the Chinese page leaves out."""
    folder = english.rpartition("/")[0]
    switches = {english.rpartition("/")[2]}
    known = {each for each, _ in PAIRS}
    found = {link.partition("#")[0] for link in links(chinese)} - switches
    assert [link for link in found if resolved(folder, link) in known] == []


@pytest.mark.parametrize(
    "block", [each for each in blocks("yaml") if each.page.endswith("_CN.md")], ids=lambda block: block.place
)
def test_the_comments_of_a_chinese_config_are_chinese(block: Block) -> None:
    comments = re.findall(r"(?:^|\s)#(.*)", block.text)
    english = [each for each in comments if len(WORD.findall(each)) > (MOST_WORDS if HAN.search(each) else MOST_NAMES)]
    assert english == []


def resolved(folder: str, link: str) -> str:
    """The page that a link from this folder leads to, seen from the repository."""
    return link.removeprefix("../") if link.startswith("../") else f"{folder}/{link}".removeprefix("/")


def test_the_chinese_template_is_the_same_config() -> None:
    english, chinese = ((ROOT / path).read_text(encoding="utf-8") for path in (TEMPLATE, chinese_of(TEMPLATE)))
    assert yaml.safe_load(chinese) == yaml.safe_load(english)
    assert commented_keys(chinese) == commented_keys(english)


def chinese_of(path: str) -> str:
    return path.replace(".yml", "_CN.yml")


def commented_keys(text: str) -> list[str]:
    """The keys that the template only mentions."""
    return re.findall(r"^\s*# ?(\w+):", text, re.MULTILINE)

"""The pages of the documentation, and what stands in them.

A fenced block has a language, and after it, where this machine lacks what its commands need, a word that says so:
`needs=server` (vLLM, SGLang, ...), `needs=hosts` (several machines, ssh, Slurm) or `needs=network` (a package index, a
hub). What stands in a block without such a word can be run here, and all of it is checked as far as it goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.conftest import ROOT

READMES = ("README.md", "README_CN.md")
PAGES = (*READMES, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
PAIRS = tuple(  # of a page and its Chinese version
    (page, chinese) for page in PAGES if (chinese := page.replace(".md", "_CN.md")) in PAGES
)
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: the first word after the fence, empty where there is none.
        needs: what this machine lacks for it, empty where it lacks nothing.
        before: the line of text above it.
    """

    page: str
    line: int
    language: str
    needs: str
    text: str
    before: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(*languages: str, pages: tuple[str, ...] = PAGES) -> list[Block]:
    """The blocks of these languages, or of all, in the order in which they stand."""
    found = []
    for page in pages:
        text = text_of(page)
        for fence in FENCE.finditer(text):
            language, _, needs = fence["info"].partition(" needs=")
            inner = "".join(line.removeprefix(fence["indent"]) for line in fence["text"].splitlines(keepends=True))
            before = text[: fence.start()].rstrip().rpartition("\n")[2]
            line = text.count("\n", 0, fence.start()) + 1
            if not languages or language in languages:
                found.append(Block(page, line, language, needs, inner, before))
    return found


def without_blocks(page: str) -> str:
    """The text around the blocks, as a reader sees it."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", text_of(page)), flags=re.DOTALL)


def headings(page: str) -> list[tuple[int, str]]:
    """Level and text of each."""
    found = re.finditer(r"^(#+) (.+)$", without_blocks(page), re.MULTILINE)
    return [(len(each[1]), each[2].strip()) for each in found]


def anchors(page: str) -> set[str]:
    """What a link to the page may end with, as GitHub makes it of the headings."""
    made: set[str] = set()
    for _, heading in headings(page):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        base = anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while anchor in made:
            number += 1
            anchor = f"{base}-{number}"
        made.add(anchor)
    return made


def links(page: str) -> Iterator[str]:
    """The targets of all links and pictures."""
    for found in re.finditer(r"\]\(([^)\s]+)\)", without_blocks(page)):
        yield found[1]


def commands(text: str) -> list[str]:
    """The command lines of a shell block: continued lines joined, comments and blank lines left out."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]

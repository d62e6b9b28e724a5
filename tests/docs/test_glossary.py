"""Chinese pages have one word for a notion: those of docs/glossary.yml."""

from __future__ import annotations

import pytest
import yaml

from tests.conftest import ROOT
from tests.docs.pages import PAGES, text_of

GLOSSARY = yaml.safe_load((ROOT / "docs" / "glossary.yml").read_text(encoding="utf-8"))
CHINESE = [page for page in PAGES if page.endswith("_CN.md")]


@pytest.mark.parametrize("notion", GLOSSARY)
def test_a_notion_has_one_chinese_word(notion: str) -> None:
    word, unused = GLOSSARY[notion]["word"], GLOSSARY[notion]["unused"]
    texts = {page: text_of(page) for page in CHINESE}
    assert any(word in text for text in texts.values())
    assert [(page, other) for page, text in texts.items() for other in unused if other in text] == []

"""Links lead to files, headings and pictures that are there."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.docs.pages import PAGES, READMES, anchors, links

LARGEST = 200_000  # bytes of a picture


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(str(target.relative_to(ROOT)))):
            broken.append(link)
    assert broken == []


def test_every_page_is_reached_from_the_readmes() -> None:
    for readme in READMES:
        reached = {link.partition("#")[0] for link in links(readme)}
        chinese = {page for page in PAGES if page.endswith("_CN.md")}
        assert [page for page in PAGES if page not in {readme, *reached, *chinese}] == []


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert {"timeline.png", "plan.png"} <= {picture.name for picture in pictures}
    assert [picture.name for picture in pictures if picture.stat().st_size > LARGEST] == []

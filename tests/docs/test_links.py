"""Links lead to files, headings and pictures that are there."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.docs.pages import PAGES, PAIRS, READMES, anchors, links

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


@pytest.mark.parametrize("readme", READMES)
def test_every_page_is_reached_from_a_readme_in_its_language(readme: str) -> None:
    reached = {link.partition("#")[0] for link in links(readme)}
    translated = dict(PAIRS)
    wanted = [page for page in PAGES if page not in translated.values()]
    if readme in translated.values():
        wanted = [translated.get(page, page) for page in wanted]
    assert [page for page in wanted if page not in {readme, *reached}] == []


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert {"timeline.png", "plan.png"} <= {picture.name for picture in pictures}
    assert [picture.name for picture in pictures if picture.stat().st_size > LARGEST] == []

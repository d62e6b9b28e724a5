"""The table of methods in docs/performance.md is what the planner says."""

from __future__ import annotations

import pytest

from benchmarks.methods import COLUMNS, MODELS, rows
from tests.conftest import ROOT

PAGES = ["docs/performance.md", "docs/performance_CN.md"]
FIRST, OTHERS = MODELS[:1], MODELS[1:]


@pytest.mark.parametrize(
    "models",
    [pytest.param(FIRST, marks=pytest.mark.slow), pytest.param(OTHERS, marks=pytest.mark.longest)],
    ids=["7b", "others"],
)
def test_the_pages_have_the_planned_table(models: tuple[str, ...]) -> None:
    expected = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, *rows(models))]
    for page in PAGES:
        assert set(expected) <= set((ROOT / page).read_text(encoding="utf-8").splitlines())

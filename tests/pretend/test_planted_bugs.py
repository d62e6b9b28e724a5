"""The pretend device sees bugs of every kind that it is there for, each planted in a run that is right without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pretend.allowed import unexpected
from tests.pretend.conftest import MakeCase, Run
from tests.pretend.planted import PLANTED

pytestmark = [pytest.mark.launched, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(run_pretended: Run, make_case: MakeCase, asked: set[str]) -> dict[str, list[dict[str, Any]]]:
    """What each run with a bug found."""
    chosen = {name: planted for name, planted in PLANTED.items() if name in asked}
    return run_pretended(
        [make_case(name, planted.model, planted=name, **planted.keys) for name, planted in chosen.items()], 1
    )


@pytest.mark.parametrize("name", [pytest.param(each, id=each) for each in PLANTED])
def test_a_planted_bug_is_seen(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    (phases,) = found[name]
    lines = [*unexpected(phases), f"{phases['events']} events"]
    assert any(line.startswith(PLANTED[name].seen) for line in lines), lines

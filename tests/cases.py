"""Which cases of a test that multiplies run where: `make test`, `make test-slow`, or `make test-all` alone.

A newcomer waits for `make test`. Where one test runs over many families, topologies or settings, one good case of each
behaviour stays there. What has every trait in common with some other case runs in `make test-all` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest


def tiered(
    cases: Iterable[Any],
    quick: Iterable[str] | None = None,
    slow: Iterable[str] | None = None,
    longest: Iterable[str] | None = None,
) -> list[Any]:
    """Give each case the mark of its tier, and its name as id; the tier that is not named has the rest.

    Args:
        cases: names, what has a `name`, or arguments, whose name is theirs joined by dashes.
        quick: names of those in `make test`, as patterns of a shell; slow, longest: of those in the longer tiers.

    Raises:
        ValueError: a pattern fits no case, or a case has two tiers: a renamed case changes its tier in silence nowhere.
    """
    given = {"quick": quick, "slow": slow, "longest": longest}
    rest = next(tier for tier, patterns in given.items() if patterns is None)
    tiers: dict[str, str] = {}
    named = {_name(case): case for case in cases}
    for tier, patterns in given.items():
        for pattern in patterns or ():
            fitting = [name for name in named if fnmatchcase(name, pattern)]
            if not fitting:
                raise ValueError(f"{pattern}: no case has this name")
            if twice := [name for name in fitting if tiers.setdefault(name, tier) != tier]:
                raise ValueError(f"{twice[0]}: in two tiers")
    marks: dict[str, Any] = {"quick": (), "slow": pytest.mark.slow, "longest": pytest.mark.longest}
    return [
        pytest.param(*_arguments(case), id=name, marks=marks[tiers.get(name, rest)]) for name, case in named.items()
    ]


def _name(case: Any) -> str:
    return str(getattr(case, "name", None) or "-".join(map(str, _arguments(case))))


def _arguments(case: Any) -> tuple[Any, ...]:
    """Several, or the case itself."""
    return case if type(case) is tuple else (case,)

"""The golden folders, each loaded once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_vision import NAMES
from tests.models.images.golden import Golden

_loaded: dict[str, Golden] = {}


def golden_of(shared: Path, name: str) -> Golden:
    folder = shared / "golden" / "vision" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    if name not in _loaded:
        _loaded[name] = Golden(folder)
    return _loaded[name]


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest, shared: Path) -> Golden:
    return golden_of(shared, f"{request.param}-tiny")

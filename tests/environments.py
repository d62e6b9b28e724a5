"""Virtual environments with packages that the project does not stand on, or a skipped test."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from benchmarks.environments import NotInstalledError, make_environment


def environment(folder: Path, *packages: str, without: Sequence[str] = ()) -> Path:
    """The Python of an environment of `benchmarks.environments`.

    The test is skipped where pip cannot get the packages; where PIPETUNE_TEST_ALL is set, as by `make test-all`, it
    fails, so that what passes there has run.
    """
    try:
        return make_environment(folder, *packages, without=without)
    except NotInstalledError as error:
        give_up(str(error))


def give_up(why: str) -> NoReturn:
    """Skip the test; under `make test-all` it fails."""
    (pytest.fail if os.environ.get("PIPETUNE_TEST_ALL") else pytest.skip)(why)

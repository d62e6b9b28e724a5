"""A launch of `--prove` ends with the process that started it, also when that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.test_parent import ends_with_its_parent, sleeper

__all__ = ["sleeper"]  # a fixture
PROVES = """
import sys
from pathlib import Path
from options.proof.launches import LaunchedRun
notes = Path(sys.argv[1]).parent
LaunchedRun(sys.argv[1], notes / "config", notes, notes).run(lambda steps: None)
"""


@pytest.mark.slow
def test_a_launch_ends_with_its_parent(sleeper: Path) -> None:
    ends_with_its_parent(sleeper, "-c", PROVES, sleeper)

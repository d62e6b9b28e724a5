"""The scripts in examples/ train, and what they trained does what it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import deepspeed

EXAMPLES = {"vit": r"right on 200 other images: (\d+)%", "encoder_decoder": r"sorted right: (\d+) of 40"}
LEAST = {"vit": 60, "encoder_decoder": 20}  # by chance 25 %, and none


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    done = deepspeed(2, f"examples/{name}.py", tmp_path / "run")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (right,) = re.findall(EXAMPLES[name], done.stdout)
    assert int(right) >= LEAST[name]

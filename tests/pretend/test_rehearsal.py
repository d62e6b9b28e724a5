"""The GPU benchmarks run on the pretend device: nothing that a GPU would refuse, and their checks see a fault there."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.gpu_models import Measurement
from tests.launching import run

pytestmark = [pytest.mark.launched, pytest.mark.longest]
TINY = Measurement("tiny", None, attention="sdpa", exact=True, keys={"bf16": {"enabled": True}})


def rehearse(folder: Path, *words: str) -> dict[str, object]:
    found = run(sys.executable, "-m", "tests.pretend.rehearse", *words, "--folder", folder)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
    figures: dict[str, object] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return figures


@pytest.mark.parametrize("check", ["attention", "parity"])
def test_a_check_holds(check: str, tmp_path: Path) -> None:
    """Not `race`: the pretend device has no streams, and remembers all the memory of its thousand rounds."""
    figures = rehearse(tmp_path, "benchmarks.gpu_checks", check)
    if check == "attention":
        assert {"torch_varlen window", "sdpa_by_document"} <= figures.keys()


@pytest.mark.parametrize("exact", [True, False])
def test_a_measurement_runs(exact: bool, tmp_path: Path) -> None:
    measurement = json.dumps(asdict(replace(TINY, exact=exact)))
    figures = rehearse(tmp_path, "benchmarks.gpu_worker", "--measurement", measurement)
    assert figures["device"] == "NVIDIA H100 80GB HBM3" and figures["planned_bytes"]

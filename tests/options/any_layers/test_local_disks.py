"""A `Pipeline` leaves its checkpoints on disks that no other host sees, and goes on from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import topology
from tests.training.checkpoint.test_local_disks import Run, assert_goes_on, disks_of, folder, run  # noqa: F401

pytestmark = [pytest.mark.launched, pytest.mark.longest]

KEYS = {"model_topo": topology((2, 1), [2, 2])}


def test_a_pipeline_goes_on_to_the_last_bit(run: Run, folder: Path) -> None:  # noqa: F811
    outcome = run("layers", "pipeline", KEYS, worker="layers_on_hosts")
    assert outcome["error"] is None, outcome["error"]
    runs = [disk / "run" for disk in disks_of(folder, "layers")]
    again = disks_of(folder, "layers-again")
    assert_goes_on(runs, again, lambda: run("layers-again", "pipeline", KEYS, worker="layers_on_hosts"))

"""What a start says of its phases."""

from __future__ import annotations

import re

import pytest

from common import phases


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False), ({"SLURM_PROCID": "3"}, False)],
)
def test_rank_0_alone_says_what_begins_and_since_when(
    environment: dict[str, str], speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(phases, "_begun", 0.0)
    phases.enter("before the start")
    phases.enter("importing torch", first=True)
    phases.enter("reading the data")
    lines = r"start: importing torch\nstart: reading the data, after [\d.]+ m?s\n"
    assert re.fullmatch(lines if speaks else "", capsys.readouterr().out)

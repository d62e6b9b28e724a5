"""Records of the comparison with other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import peers


@pytest.mark.parametrize("name", ["trainer-256", "trl-mixed"])
def test_a_clone_without_further_data_has_enough_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "pairs", lambda: iter([("one?", "1"), ("two?", "2"), ("three?", "3")]))

    peers.write_records(tmp_path, peers.CASES[name])

    records = json.loads((tmp_path / "records.json").read_text(encoding="utf-8"))
    assert len(records) == peers.RECORDS
    answers = [(each.get("chosen") or each["messages"])[-1]["content"] for each in records[:4]]
    assert answers[0][0] + answers[1][0] + answers[2][0] + answers[3][0] == "1231"

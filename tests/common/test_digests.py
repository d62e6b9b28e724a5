"""Digests of files: remembered while these stay the same, and where there is a place for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.digests import Digests


def test_several_files_have_one_digest_until_one_of_them_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.digests.SETTLED", -1.0)
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_bytes(b"1")
    digests, others = Digests(tmp_path / "notes", "a"), Digests(tmp_path / "notes", "b")
    assert digests.take([one, two], lambda: "first") == "first" == digests.known([one, two])
    assert digests.known([two, one]) is None and digests.known([one]) is None and others.known([one, two]) is None
    before = two.stat()
    two.write_bytes(b"2")
    os.utime(two, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests.known([one, two]) is None


def test_a_file_that_changes_meanwhile_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.digests.SETTLED", -1.0)
    (path := tmp_path / "one").write_bytes(b"1")

    def digest() -> str:
        path.write_bytes(b"12")
        return "of both"

    assert Digests(tmp_path / "notes").take([path], digest) == "of both"
    assert Digests(tmp_path / "notes").known([path]) is None


def test_where_nothing_can_be_written_the_note_alone_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.digests.SETTLED", -1.0)
    (path := tmp_path / "one").write_bytes(b"1")
    assert Digests(path / "notes").take([path], lambda: "1") == "1"  # no folder can be there
    with pytest.raises(FileNotFoundError):
        Digests(tmp_path / "notes").known([tmp_path / "gone"])

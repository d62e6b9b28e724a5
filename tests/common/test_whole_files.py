"""Only regular, whole files of this user are read; nothing waits for a FIFO."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from common.lease import Held, Lease
from common.whole_files import read_checked, read_regular, replace_checked


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("latest")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError):
        read_regular(path)


def test_a_checked_file_comes_back(tmp_path: Path) -> None:
    replace_checked(tmp_path / "a", '{"a":\n 1}')
    assert read_checked(tmp_path / "a") == b'{"a":\n 1}'


@pytest.mark.parametrize("change", [lambda text: text.replace(b"1", b"2"), lambda text: text[:4], lambda _: b""])
def test_a_changed_file_is_noticed(tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    replace_checked(tmp_path / "a", '{"a": 1}')
    (tmp_path / "a").write_bytes(change((tmp_path / "a").read_bytes()))
    with pytest.raises(ValueError, match="damaged"):
        read_checked(tmp_path / "a")


def test_another_users_file_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_checked(tmp_path / "a", "1")
    monkeypatch.setattr(os, "getuid", lambda: -5)
    with pytest.raises(ValueError, match="another user"):
        read_checked(tmp_path / "a")


@pytest.mark.parametrize("ahead", [5, 3600, 10**9])
@pytest.mark.parametrize("content", ['["nodeX",99,"2026-01-01","other-kernel","00"]', "[torn", ""])
def test_a_lease_with_a_future_time_is_waited_for_a_minute_at_most(tmp_path: Path, ahead: int, content: str) -> None:
    lease = tmp_path / "lease-000001"
    lease.write_text(content)
    os.utime(lease, (lease.stat().st_mtime + ahead,) * 2)
    with pytest.raises(Held) as held:
        Lease(tmp_path, "lease", lambda _: None).take()
    assert 0 < held.value.patience <= 60


def test_a_lease_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lease-000001")
    with pytest.raises(OSError, match="regular file"):
        Lease(tmp_path, "lease", lambda _: None).take()

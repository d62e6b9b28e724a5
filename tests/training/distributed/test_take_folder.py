"""The errors of a start in a folder in which it cannot train, and of a run that lost its folder."""

from __future__ import annotations

import json
import queue
from functools import partial
from pathlib import Path

import pytest

from common.lease import Holder, Lease
from training.distributed import rank_monitor
from training.distributed.rank_monitor import LEASE, take_folder
from training.errors import ConfigError

ELSEWHERE = Holder("node9", 17, "2020-01-01 00:00:00 +0000", "another kernel", "token")


def unheard(error: ConfigError) -> None:
    raise AssertionError(error)


def test_a_second_start_names_who_trains(tmp_path: Path) -> None:
    first = take_folder(tmp_path, unheard)
    with pytest.raises(ConfigError, match=r"^save_path: .*: is being trained by process \d+ on .*: stop that one"):
        take_folder(tmp_path, unheard)
    first.release()
    take_folder(tmp_path, unheard).release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^save_path: .*file: cannot be written: Not a directory"):
        take_folder(tmp_path / "file", unheard)


def test_a_wait_for_another_machine_is_logged_once_and_a_lost_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_monitor, "Lease", partial(Lease, interval=0.05))
    (tmp_path / f"{LEASE}-000001").write_text(json.dumps(ELSEWHERE))
    lost: queue.Queue[ConfigError] = queue.Queue()
    take_folder(tmp_path, lost.put)
    assert capsys.readouterr().out == f"save_path: waiting up to 0 s for a heartbeat of {ELSEWHERE}\n"
    (tmp_path / f"{LEASE}-000002").unlink()
    message = (
        "this run stood still and lost its lease, or somebody removed it; held now by nobody; expected one run a folder"
    )
    assert str(lost.get(timeout=300)) == f"save_path: {tmp_path}: {message}"

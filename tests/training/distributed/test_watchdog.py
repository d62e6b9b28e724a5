"""The watchdog tells every rank how the run ended, even though it lives in the process of one of them."""

from __future__ import annotations

import json
import time
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

from tests.launching import IDLE
from training.distributed.watchdog import Member, Watchdog

SECRET = b"secret"
RANKS = 3
FAILED = {"kind": "failed", "text": "no", "report": "", "waiting": False, "code": 2}


def say(line: Connection, **message: Any) -> None:
    line.send_bytes(json.dumps(message).encode())


@pytest.fixture
def lines() -> list[Connection]:
    """One connection a rank, as each rank holds one; rank 0's came first."""
    watchdog = Watchdog(RANKS, timeout_minutes=1, secret=SECRET)
    watchdog.start([Member(rank, rank, "host") for rank in range(RANKS)])
    lines = []
    for rank in range(RANKS):
        lines.append(Client(("127.0.0.1", watchdog.port), authkey=SECRET))
        say(lines[-1], kind="joined", rank=rank)
    return lines


@pytest.mark.parametrize(("last_words", "kind"), [({"kind": "done"}, "end"), (FAILED, "verdict")])
def test_rank_0_may_leave_as_soon_as_it_is_told(
    lines: list[Connection], last_words: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rank 0 left before the others were told, they took it for killed and said so after the true error."""
    for line in lines:
        say(line, **last_words)
    send = Connection.send_bytes

    def slowly(line: Connection, message: bytes) -> None:
        send(line, message)
        time.sleep(0.2)

    monkeypatch.setattr(Connection, "send_bytes", slowly)
    assert lines[0].poll(IDLE)
    assert [rank for rank, line in enumerate(lines) if not line.poll(0)] == []
    assert {json.loads(line.recv_bytes())["kind"] for line in lines} == {kind}

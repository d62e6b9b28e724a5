"""The failure detector sends every rank the same verdict, which names the rank that was first."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from training.distributed import failure_detector
from training.distributed.failure_detector import FailureDetector
from training.distributed.rank_monitor import connect

SECRET = "secret"
RANKS = 3
PATIENCE = 300.0  # seconds; what comes at all comes long before, on any machine


class Line:
    """A connection to the detector, as each rank holds one."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._lines = self.socket.makefile("rb")

    def send(self, line: str) -> None:
        self.socket.sendall(f"{line}\n".encode())

    def say(self, kind: str, **message: Any) -> None:
        self.send(json.dumps({"kind": kind, **message}))

    def hear(self) -> dict[str, Any]:
        """The next message; empty where the detector has closed the connection."""
        line = self._lines.readline()
        return dict(json.loads(line)) if line else {}

    def has_heard(self) -> bool:
        self.socket.setblocking(False)
        try:
            return bool(self._lines.peek())
        finally:
            self.socket.settimeout(PATIENCE)

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


class Run:
    """A detector and its port."""

    def __init__(self, minutes: float = 60) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.detector = FailureDetector([f"rank {rank}" for rank in range(RANKS)], minutes, listener, SECRET)

    def join(self) -> list[Line]:
        lines = [Line(self.port) for _ in range(RANKS)]
        for rank, line in enumerate(lines):
            line.send(f"{SECRET} {rank}")
        return lines


MISTAKE = {"text": "no", "code": 2}
BROKEN_PIPE = {"text": "RuntimeError: connection reset", "trace": "Traceback", "waiting": True}


@pytest.mark.parametrize(("last_words", "kind"), [("done", "end"), ("failed", "verdict")])
def test_rank_0_gets_the_last_message(last_words: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When rank 0 left before the others had theirs, they took it for killed and printed that after the true error."""
    write = asyncio.StreamWriter.write

    def slowly(writer: asyncio.StreamWriter, message: bytes) -> None:
        write(writer, message)
        time.sleep(0.2)

    monkeypatch.setattr(asyncio.StreamWriter, "write", slowly)
    lines = Run().join()
    for line in lines:
        line.say(last_words, **(MISTAKE if last_words == "failed" else {}))
    assert lines[0].hear()["kind"] == kind
    assert all(line.has_heard() for line in lines[1:])
    assert {line.hear()["kind"] for line in lines[1:]} == {kind}


def test_a_death_counts_before_the_errors_of_communication_that_it_makes() -> None:
    lines = Run().join()
    lines[2].say("failed", **BROKEN_PIPE)
    lines[0].say("failed", **BROKEN_PIPE)
    lines[1].close()
    verdict = lines[0].hear()
    assert verdict["text"].startswith("rank 1 died")
    assert (verdict["code"], verdict["speaker"], verdict["trace"]) == (1, 2, "")
    assert lines[2].hear() == verdict


def test_an_error_of_its_own_counts_before_a_death() -> None:
    lines = Run().join()
    lines[1].close()
    lines[2].say("failed", **MISTAKE)
    verdict = lines[0].hear()
    assert (verdict["text"], verdict["code"], verdict["speaker"]) == ("rank 2: no", 2, 0)


def test_what_all_ranks_say_names_none() -> None:
    lines = Run().join()
    for line in lines:
        line.say("failed", **MISTAKE)
    assert [line.hear()["text"] for line in lines] == ["no"] * RANKS


@pytest.mark.parametrize("busy", [[1], []])
def test_a_rank_that_waits_for_nobody_hangs(busy: list[int]) -> None:
    run = Run(minutes=1e-4)
    lines = run.join()
    run.detector.mark("step 7")
    for rank, line in enumerate(lines):
        assert line.hear()["kind"] == "where"
        line.say("position", text=f"loop.py:{rank}", trace="stack\n", waiting=rank not in busy)
    verdict = lines[0].hear()
    named = [rank for rank in range(RANKS) if f"rank {rank} in loop.py:{rank}" in verdict["text"]]
    assert named == (busy or [0, 1, 2])
    assert ("hangs" if busy else "all wait") in verdict["text"] and "after step 7" in verdict["text"]
    assert verdict["code"] == 1


def test_a_run_at_its_end_may_take_its_time() -> None:
    """An export takes longer than any step."""
    run = Run(minutes=0.02)  # long enough for a busy machine to come from the mark to the rest
    lines = run.join()
    run.detector.mark("step 7")
    run.detector.expect_no_marks()
    time.sleep(0.02 * 60 + 3 * failure_detector.POLL)
    for line in lines:
        line.say("done")
    assert [line.hear()["kind"] for line in lines] == ["end"] * RANKS


def test_strangers_change_nothing() -> None:
    """Those who send something wrong are disconnected, and silent ones hold nobody up."""
    run = Run()
    silent = [Line(run.port) for _ in range(20)]
    silent[0].socket.sendall(b"\x16\x03\x01 half a line of some other protocol")
    for first in ("wrong 1", "", "secret", f"{SECRET}  1 2", '{"kind": "done"}', "[" * 100_000):
        stranger = Line(run.port)
        stranger.send(first)
        assert stranger.hear() == {}
    lines = run.join()
    for line in lines:
        line.say("done")
    assert [line.hear()["kind"] for line in lines] == ["end"] * RANKS


def test_a_stranger_has_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "HANDSHAKE", 0.1)
    assert Line(Run().port).hear() == {}


def test_a_rank_sends_the_secret_as_soon_as_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that connected early waited for all others first, and was taken for a stranger."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        connect(listener.getsockname()[1], f"{SECRET} 1\n"),
        listener.accept()[0] as accepted,
    ):
        accepted.settimeout(PATIENCE)
        assert accepted.makefile().readline() == f"{SECRET} 1\n"

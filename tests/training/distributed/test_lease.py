"""One writer per run folder, whoever starts, dies or stands still."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from training.distributed.lease import NAME, Holder, Lease
from training.errors import ConfigError

FORK = multiprocessing.get_context("fork")
NEVER = 1e6  # seconds between heartbeats: whoever waits for one waits for ever
SOON = 0.02
STARTS = 4
ROUNDS = 25
LOST = 7  # exit code
ELSEWHERE = Holder("node9", 17, "2020-01-01 00:00:00 +0000", "another kernel", "token")


def unheard(error: ConfigError) -> None:
    raise AssertionError(error)


def take(folder: Path, interval: float = NEVER) -> Lease:
    return Lease(folder, unheard, interval)


def leases(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{NAME}*"))


def move_elsewhere(lease: Path) -> None:
    """Let a lease look as if it were held on another machine."""
    lease.write_text(json.dumps(ELSEWHERE))


@contextmanager
def process(work: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Another process; `work` gets a pipe's end besides its arguments, and this block the process and the other end."""
    here, there = FORK.Pipe()
    child = FORK.Process(target=work, args=(there, *arguments))
    child.start()
    try:
        yield child, here
    finally:
        child.kill()
        child.join()


def hold(pipe: Any, folder: Path, interval: float = NEVER) -> None:
    lease = Lease(folder, unheard, interval)
    pipe.send(os.getpid())
    pipe.recv()
    lease.release()
    pipe.send("released")


def test_a_second_start_is_told_who_trains(tmp_path: Path) -> None:
    with process(hold, tmp_path) as (_, pipe):
        pid = pipe.recv()
        before = leases(tmp_path)
        with pytest.raises(ConfigError, match=rf"is being trained by process {pid} on \S+ since 20.*expected one run"):
            take(tmp_path)
        assert leases(tmp_path) == before
        pipe.send("release")
        pipe.recv()
        take(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_holders_lease_is_free_at_once(tmp_path: Path) -> None:
    with process(hold, tmp_path) as (child, pipe):
        pipe.recv()
        child.kill()
        child.join()
        assert len(leases(tmp_path)) == 1
        take(tmp_path).release()
    assert leases(tmp_path) == []


def rounds(pipe: Any, folder: Path, barrier: Any) -> None:
    """Start again and again together with others; every second winner dies, for its lease."""
    for number in range(ROUNDS):
        barrier.wait()
        try:
            lease = Lease(folder, unheard, NEVER)
            pipe.send((os.getpid(), ""))
        except ConfigError as error:
            lease = None
            pipe.send((os.getpid(), str(error)))
        barrier.wait()
        if lease and number % 2:
            lease.release()
        elif lease:
            os.close(lease._file)  # as the kernel does
        del lease
        barrier.wait()


def test_of_many_starts_at_once_one_gets_it(tmp_path: Path) -> None:
    barrier = FORK.Barrier(STARTS)
    pipes, children = [], []
    for _ in range(STARTS):
        here, there = FORK.Pipe()
        children.append(FORK.Process(target=rounds, args=(there, tmp_path, barrier)))
        children[-1].start()
        pipes.append(here)
    for _ in range(ROUNDS):
        results = [pipe.recv() for pipe in pipes]
        winners = [pid for pid, refused in results if not refused]
        assert len(winners) == 1
        assert all(f"by process {winners[0]} on" in refused for _, refused in results if refused)
    for child in children:
        child.join()


def test_another_machines_heartbeat_keeps_its_lease(tmp_path: Path) -> None:
    with process(hold, tmp_path, SOON) as (_, pipe):
        pipe.recv()
        (lease,) = leases(tmp_path)
        held = lease.read_text()
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(SOON):
                os.utime(lease)

        move_elsewhere(lease)
        heart = threading.Thread(target=beat)
        heart.start()
        try:
            with pytest.raises(ConfigError, match="is being trained by process 17 on node9 since 2020"):
                take(tmp_path, interval=100.0)
        finally:
            stop.set()
            heart.join()
        lease.write_text(held)
        assert leases(tmp_path) == [lease]


@pytest.mark.parametrize("content", [json.dumps(ELSEWHERE), "", "[1, 2]", "{"])
def test_a_lease_without_heartbeat_is_taken_over(content: str, tmp_path: Path) -> None:
    """Its machine is gone, or its process was killed before it could write who it is."""
    dead = tmp_path / f"{NAME}000041"
    dead.write_text(content)
    lease = take(tmp_path, SOON)
    assert [path.name for path in leases(tmp_path)] == [f"{NAME}000042"]
    lease.release()
    assert leases(tmp_path) == []


def train(pipe: Any, folder: Path) -> None:
    """Hold a lease and check it all the time, as a run does at each step."""
    lease = Lease(folder, lambda _: None, NEVER)
    pipe.send("training")
    try:
        while True:
            lease.check()
    except ConfigError as error:
        pipe.send(str(error))
        os._exit(LOST)


def test_who_stood_still_for_too_long_learns_it(tmp_path: Path) -> None:
    with process(train, tmp_path) as (child, pipe):
        pipe.recv()
        os.kill(child.pid, signal.SIGSTOP)
        (lease,) = leases(tmp_path)
        move_elsewhere(lease)  # so that only the heartbeat counts, as for a start on another machine
        successor = take(tmp_path, SOON)
        os.kill(child.pid, signal.SIGCONT)
        assert "lost its lease" in (told := pipe.recv()) and f"held now by process {os.getpid()} on" in told
        child.join()
        assert child.exitcode == LOST
        successor.check()
        successor.release()


def test_the_heart_notices_a_loss(tmp_path: Path) -> None:
    lost = threading.Event()
    Lease(tmp_path, lambda _: lost.set(), SOON)
    leases(tmp_path)[0].unlink()
    assert lost.wait(300)


def test_release_leaves_the_successors_lease(tmp_path: Path) -> None:
    lease = take(tmp_path)
    leases(tmp_path)[0].unlink()
    os.close(lease._file)
    successor = take(tmp_path)
    lease.release()
    successor.check()


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: cannot be written: Not a directory"):
        take(tmp_path / "file")


def test_other_files_are_let_alone(tmp_path: Path) -> None:
    names = [f"{NAME}mine", f"{NAME}1", "lease-000001"]
    for name in names:
        (tmp_path / name).touch()
    take(tmp_path).release()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)

"""A lease has one holder at a time, whichever process starts, dies or is suspended."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from common.lease import Held, Holder, Lease
from tests.disks import fill, small_disk

FORK = multiprocessing.get_context("fork")
NAME = "lease"
NEVER = 1e6  # seconds between heartbeats: whoever waits for one waits for ever
SOON = 0.02
STARTS = 4
ROUNDS = 25
LOST = 7  # exit code
ELSEWHERE = Holder("node9", 17, "2020-01-01 00:00:00 +0000", "another kernel", "token")


def unheard(successor: str) -> None:
    raise AssertionError(successor)


def take(folder: Path, interval: float = NEVER) -> Lease:
    """Take a lease; retry until it is known whether its holder is alive."""
    lease = Lease(folder, NAME, unheard, interval)
    while True:
        try:
            lease.take()
            return lease
        except Held as held:
            if held.patience == 0:
                raise
        time.sleep(0.002)


def leases(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{NAME}-*"))


def move_elsewhere(lease: Path) -> None:
    """Make a lease look as if another machine held it."""
    lease.write_text(json.dumps(ELSEWHERE))


@contextmanager
def process(work: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run `work` in another process with one end of a pipe; the block gets the process and the other end."""
    here, there = FORK.Pipe()
    child = FORK.Process(target=work, args=(there, *arguments))
    child.start()
    try:
        yield child, here
    finally:
        child.kill()
        child.join()


def hold(pipe: Any, folder: Path, interval: float = NEVER) -> None:
    lease = take(folder, interval)
    pipe.send(os.getpid())
    pipe.recv()
    lease.release()
    pipe.send("released")


def test_a_second_process_learns_the_holder(tmp_path: Path) -> None:
    with process(hold, tmp_path) as (_, pipe):
        pid = pipe.recv()
        before = leases(tmp_path)
        with pytest.raises(Held, match=rf"^process {pid} on \S+ since 20"):
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


def make(pipe: Any, folder: Path) -> None:
    lease = take(folder)
    pipe.send(os.getpid())
    pipe.recv()
    (folder / "made").write_text("by another")
    lease.release()


@pytest.mark.parametrize("dies", [False, True], ids=["it is made", "its maker dies"])
def test_who_wants_what_another_makes_waits_for_it_and_makes_it_after_a_death(dies: bool, tmp_path: Path) -> None:
    heard: list[int] = []
    made = tmp_path / "made"
    with process(make, tmp_path) as (child, pipe):
        pid = pipe.recv()

        def wait(held: Held) -> None:
            assert held.holder is not None
            if not heard:
                if dies:
                    child.kill()
                    child.join()
                else:
                    pipe.send("make it")
            heard.append(held.holder.pid)

        lease = Lease(tmp_path, NAME, unheard, NEVER)
        found = lease.take_or_find(lambda: made.read_text() if made.exists() else None, wait)
    assert set(heard) == {pid}
    if dies:
        assert found is None and lease.successor() is None
        lease.release()
    else:
        assert found == "by another"
    assert leases(tmp_path) == []


def test_what_is_there_needs_no_lease(tmp_path: Path) -> None:
    lease = Lease(tmp_path, NAME, unheard, NEVER)
    assert lease.take_or_find(lambda: 7, lambda _: pytest.fail("nobody has it")) == 7
    assert list(tmp_path.iterdir()) == []


def rounds(pipe: Any, folder: Path, barrier: Any) -> None:
    """Start again and again together with others; every second winner dies, for its lease."""
    for number in range(ROUNDS):
        barrier.wait()
        try:
            lease = take(folder)
            pipe.send((os.getpid(), ""))
        except Held as held:
            lease = None
            pipe.send((os.getpid(), str(held)))
        barrier.wait()
        if lease and number % 2:
            lease.release()
        elif lease:
            os.close(lease._file)  # as the kernel does
        del lease
        barrier.wait()


@pytest.mark.slow
def test_one_of_many_processes_gets_it(tmp_path: Path) -> None:
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
        assert all(f"process {winners[0]} on" in refused for _, refused in results if refused)
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
            with pytest.raises(Held, match=r"^process 17 on node9 since 2020"):
                take(tmp_path, interval=100.0)
        finally:
            stop.set()
            heart.join()
        lease.write_text(held)
        assert leases(tmp_path) == [lease]


@pytest.mark.parametrize("content", [json.dumps(ELSEWHERE), "", "[1, 2]", "{"])
def test_a_lease_without_heartbeat_is_taken_over(content: str, tmp_path: Path) -> None:
    """Its machine is gone, or its process was killed before it could write who it is."""
    dead = tmp_path / f"{NAME}-000041"
    dead.write_text(content)
    lease = take(tmp_path, SOON)
    assert [path.name for path in leases(tmp_path)] == [f"{NAME}-000042"]
    lease.release()
    assert leases(tmp_path) == []


def write(pipe: Any, folder: Path) -> None:
    """Hold a lease and check it all the time, as a run does at each step."""
    lease = take(folder)
    pipe.send("writing")
    while (successor := lease.successor()) is None:
        pass
    pipe.send(successor)
    os._exit(LOST)


def test_a_suspended_holder_learns_of_its_successor(tmp_path: Path) -> None:
    with process(write, tmp_path) as (child, pipe):
        pipe.recv()
        os.kill(child.pid, signal.SIGSTOP)
        (lease,) = leases(tmp_path)
        move_elsewhere(lease)  # so that only the heartbeat counts, as for a start on another machine
        successor = take(tmp_path, SOON)
        os.kill(child.pid, signal.SIGCONT)
        assert pipe.recv().startswith(f"process {os.getpid()} on ")
        child.join()
        assert child.exitcode == LOST
        assert successor.successor() is None
        successor.release()


def test_the_heartbeat_notices_a_lost_lease(tmp_path: Path) -> None:
    lost: queue.Queue[str] = queue.Queue()
    Lease(tmp_path, NAME, lost.put, SOON).take()
    leases(tmp_path)[0].unlink()
    assert lost.get(timeout=300) == "nobody"


def test_release_leaves_the_successors_lease(tmp_path: Path) -> None:
    lease = take(tmp_path)
    leases(tmp_path)[0].unlink()
    os.close(lease._file)
    successor = take(tmp_path)
    lease.release()
    assert successor.successor() is None


@pytest.mark.parametrize("number", ["999999", "1000000", "9" * 30])
def test_no_number_is_too_large_to_be_seen(number: str, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}-{number}").write_text("of nobody")
    os.utime(tmp_path / f"{NAME}-{number}", (0, 0))
    lease = Lease(tmp_path, NAME, unheard, SOON)
    while True:
        with suppress(Held):
            lease.take()
            break
    assert [path.name for path in leases(tmp_path)] == [f"{NAME}-{int(number) + 1}"]
    with pytest.raises(Held):
        Lease(tmp_path, NAME, unheard, SOON).take()
    lease.release()


def test_a_lease_nested_without_end_names_no_holder(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}-000001").write_text("[" * 200_000)
    with pytest.raises(Held) as held:
        Lease(tmp_path, NAME, unheard, NEVER).take()
    assert held.value.holder is None


def test_other_files_stay(tmp_path: Path) -> None:
    names = [f"{NAME}-mine", f"{NAME}-1", f"other-{NAME}-000001"]
    for name in names:
        (tmp_path / name).touch()
    take(tmp_path).release()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_full_disk_leaves_no_lease_behind(tmp_path: Path) -> None:
    """An empty one would keep the next process waiting until its maker counts as dead."""
    with small_disk(tmp_path / "disk", 1) as (disk, may_fill):
        if not may_fill:
            pytest.skip("this machine does not let a test mount a file system")
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            Lease(disk, NAME, unheard).take()
        assert leases(disk) == []
        filler.unlink()
        lease = Lease(disk, NAME, unheard)
        lease.take()
        assert len(leases(disk)) == 1
        lease.release()

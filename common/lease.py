"""Let one process at a time write to a folder, also one that several hosts share.

A lease is a file, `<name>-<number>`, that names its holder. It is created exclusively, so one of several processes gets
it. The holder keeps a kernel lock on it and touches it every INTERVAL. Another process decides whether it is alive:

* under the same kernel by the lock, which the kernel drops when a process ends. (Containers share host names and
  process numbers, so these prove nothing.)
* elsewhere by the heartbeat: alive if the modification time moves, dead if it is EXPIRY intervals old and did not move
  while this process watched. Age is the difference to a file written now, so only the file system's clock counts.

After a dead lease a process creates the next number, which again only one can, then removes the dead one. If it finds
other leases than those it examined, it gives way and starts over. A holder that was suspended until another took over
finds its successor by `successor` before it writes anything more.

Costs a touch every 10 s, and a small read for each call of `successor`.

What one process writes on one host needs the lock of the kernel alone: `lock`.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import random
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from common.whole_files import regular

POLL = 0.2  # seconds between two looks at what another process makes
INTERVAL = 10.0  # seconds between two heartbeats
GIVING_WAY = 0.1  # seconds that a process may take to give way
EXPIRY, WATCH = 6, 2  # intervals without a heartbeat until a holder is dead; the watched ones among them at least


Value = TypeVar("Value")


class Holder(NamedTuple):
    """The holder of a lease; `kernel` is empty where the file system has no locks, `token` is random."""

    host: str
    pid: int
    since: str
    kernel: str
    token: str

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"

    def __str__(self) -> str:
        return f"{self.name} since {self.since}"


class Held(Exception):
    """Another process has the lease.

    Attributes:
        holder: None if its process has not written it yet, or died before.
        patience: seconds until a silent holder counts as dead; 0 if it is certainly alive.
    """

    def __init__(self, holder: Holder | None, patience: float = 0.0) -> None:
        super().__init__(str(holder))
        self.holder, self.patience = holder, patience


class Found(NamedTuple):
    """A lease on the disk, as in `Held`; `touched` in ns."""

    path: Path
    holder: Holder | None
    locked: bool
    touched: int


class Lease:
    """Held from a successful `take` until `release`.

    Args:
        name: of the file in `folder`, without its number.
        lost: called in another thread with the new holder, if one took over; see `successor`.
        interval: seconds between two heartbeats.
    """

    def __init__(self, folder: Path, name: str, lost: Callable[[str], object], interval: float = INTERVAL) -> None:
        self._folder, self._name, self._lost, self._interval = folder, name, lost, interval
        self.holder: Holder  # once it is held
        self._ended = threading.Event()
        self._watched: dict[tuple[Path, Holder | None], tuple[int, float]] = {}  # last touch; when it counts as dead

    def take(self) -> Holder:
        """Get the lease without waiting for its holder; return what was written as the holder.

        Raises:
            Held: another process has it that is or may be alive; a later call knows more.
            OSError: the folder cannot be written.
        """
        while True:
            try:
                if self._try():
                    break
            except Held as held:
                time.sleep(GIVING_WAY)
                if any(lease.holder == held.holder for lease in self._leases()):  # else it gave way itself
                    raise
            time.sleep(random.uniform(0.0, 0.1))  # not in step with another process that gave way
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        return self.holder

    def take_or_find(self, find: Callable[[], Value | None], wait: Callable[[Held], object]) -> Value | None:
        """Get the lease to make something, unless that is found; return what was found, without the lease.

        Args:
            find: looks for it.
            wait: called now and then while another process has the lease.

        Raises:
            OSError: the folder cannot be written.
        """
        while (found := find()) is None:
            try:
                self.take()
                break
            except Held as held:
                wait(held)
                time.sleep(POLL)
        else:
            return found

        if (found := find()) is not None:  # its last holder was done meanwhile
            self.release()
        return found

    def successor(self) -> str | None:
        """Name who has taken over, `nobody` if the file was removed; None while the lease is held."""
        with suppress(OSError):  # a disk that does not answer proves nothing
            found = _read(self._path)
            if found is None or found.holder != self.holder:
                return next((str(lease.holder) for lease in self._leases()), "nobody")
        return None

    def release(self) -> None:
        """Give the lease up."""
        self._ended.set()
        if self.successor() is None:
            with suppress(OSError):
                self._path.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(self._interval):
            if successor := self.successor():
                self._lost(successor)
                break
            with suppress(OSError):
                os.utime(self._file)  # to the file system's own time
        os.close(self._file)

    def _try(self) -> bool:
        """Try to take the lease; return False if another process came in between."""
        found = self._leases()
        for lease in found:
            self._see_dead(lease)
        number = int(found[-1].path.name.rpartition("-")[2]) + 1 if found else 1
        self._path = self._folder / f"{self._name}-{number:06d}"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        kernel = ""
        with suppress(OSError):  # a file system without locks
            lock(self._file, wait=True)
            kernel = kernel_name()
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self.holder = Holder(socket.gethostname(), os.getpid(), now, kernel, secrets.token_hex(8))
        try:
            os.write(self._file, json.dumps(self.holder).encode())
        except OSError:  # a full disk: an empty lease would hold up the next process
            self._give_up()
            raise
        if [lease for lease in self._leases() if lease.path != self._path] == found:
            for lease in found:
                lease.path.unlink(missing_ok=True)
            return True
        self._give_up()
        return False

    def _give_up(self) -> None:
        self._path.unlink()
        os.close(self._file)

    def _see_dead(self, lease: Found) -> None:
        if lease.holder and lease.holder.kernel == kernel_name():
            if lease.locked:
                raise Held(lease.holder)
            return
        key = lease.path, lease.holder
        touched, end = self._watched.get(key, (None, 0.0))
        if touched != lease.touched:
            with tempfile.TemporaryFile(dir=self._folder) as probe:
                # A clock that was ahead left a time in the future.
                age = max(0.0, (os.fstat(probe.fileno()).st_mtime_ns - lease.touched) / 1e9)
            end = time.monotonic() + max(EXPIRY * self._interval - age, WATCH * self._interval)
            self._watched[key] = lease.touched, end
            if touched is not None:
                raise Held(lease.holder)
        if (patience := end - time.monotonic()) > 0:
            raise Held(lease.holder, patience)

    def _leases(self) -> list[Found]:
        paths = list(self._folder.glob(f"{self._name}-{'[0-9]' * 6}*"))
        numbered = {int(number): path for path in paths if (number := path.name.rpartition("-")[2]).isdecimal()}
        return [lease for _, path in sorted(numbered.items()) if (lease := _read(path))]


def _read(path: Path) -> Found | None:
    # Opened anew: a shared disk then looks past its cache.
    with suppress(FileNotFoundError), open(path, "rb", opener=regular) as file:
        holder = None
        with suppress(ValueError, TypeError, RecursionError):
            holder = Holder(*json.loads(file.read()))
        locked = False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several processes may look at once
        except OSError as error:
            locked = isinstance(error, BlockingIOError)
        return Found(path, holder, locked, os.fstat(file.fileno()).st_mtime_ns)
    return None


def lock(file: IO[Any] | int, wait: bool) -> None:
    """Lock an open file until it is closed, or the process ends.

    Args:
        wait: until whoever looks at it is done.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def kernel_name() -> str:
    """Name this boot of this machine; processes with the same name see each other's locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()

"""One writer per `save_path`: a lease that rank 0 holds as long as its run may write there.

The lease is a file, `pipetune-lease-<number>`, that says who trains. It is created exclusively, so of several starts
one gets it. Its holder keeps a kernel lock on it and touches it every INTERVAL. Whether the holder of one that is found
is alive,

* the kernel lock tells at once where it was taken under this kernel, which drops it when a process ends, however it
  ends. (Containers share host names and process numbers, so these tell nothing.)
* its heartbeat tells elsewhere: alive when the modification time moves, dead when it is EXPIRY old and did not move
  while this start watched. Age is the difference to a file written now, so only the file system's clock counts.

A dead lease is followed by the next number, which again only one start can create; then the dead one is removed. A
start that finds others beside its new one than those that it judged gives way and looks again. A holder that stood
still for so long that another followed it learns it from `check`, before it writes anything more.

Costs a touch every 10 s and a small read a step.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from training.errors import ConfigError

NAME = "pipetune-lease-"
INTERVAL = 10.0  # seconds between two heartbeats
EXPIRY, WATCH = 6, 2  # a holder is dead after so many intervals without a heartbeat, seen for at least so many


class Holder(NamedTuple):
    """Who trains; `kernel` is empty where the file system has no locks, `token` is random."""

    host: str
    pid: int
    since: str
    kernel: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Found(NamedTuple):
    """A lease on the disk; there is no holder where its process has not written it yet, or died before."""

    path: Path
    holder: Holder | None
    locked: bool
    touched: int


class Lease:
    """Held from its construction until `release`.

    Args:
        folder: the run's folder.
        lost: told by another thread when somebody has taken over.
        interval: seconds between two heartbeats.

    Raises:
        ConfigError: another run holds it, or the folder cannot be written.
    """

    def __init__(self, folder: Path, lost: Callable[[ConfigError], None], interval: float = INTERVAL) -> None:
        self._folder, self._lost, self._interval = folder, lost, interval
        self._ended = threading.Event()
        try:
            while not self._take():
                time.sleep(random.uniform(0.0, 0.1))  # not in step with another start that gave way
        except OSError as error:
            raise ConfigError(f"save_path: {folder}: cannot be written: {error.strerror}") from None
        threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def check(self) -> None:
        """See that nobody has taken over.

        Raises:
            ConfigError: somebody has.
        """
        with suppress(OSError):  # a disk that does not answer tells nothing
            found = _read(self._path)
            if found is None or found.holder != self._holder:
                now = next((lease.holder for lease in _leases(self._folder)), "nobody")
                lost = f"this run stood still and lost its lease, or somebody removed it; held now by {now}"
                raise ConfigError(f"save_path: {self._folder}: {lost}; expected one run a folder")

    def release(self) -> None:
        """Let the next run have it."""
        self._ended.set()
        with suppress(OSError, ConfigError):
            self.check()
            self._path.unlink()

    def _beat(self) -> None:
        try:
            while not self._ended.wait(self._interval):
                self.check()
                with suppress(OSError):
                    os.utime(self._file)  # to the file system's own time
        except ConfigError as error:
            self._lost(error)

    def _take(self) -> bool:
        """Try once; False where another start came in between."""
        found = _leases(self._folder)
        if not all(self._is_dead(lease) for lease in found):
            return False
        number = int(found[-1].path.name.removeprefix(NAME)) + 1 if found else 1
        self._path = self._folder / f"{NAME}{number:06d}"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        kernel = ""
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
            kernel = _kernel()
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._holder = Holder(socket.gethostname(), os.getpid(), now, kernel, secrets.token_hex(8))
        os.write(self._file, json.dumps(self._holder).encode())
        if [lease for lease in _leases(self._folder) if lease.path != self._path] == found:
            for lease in found:
                lease.path.unlink()
            return True
        self._path.unlink()
        os.close(self._file)
        return False

    def _is_dead(self, lease: Found) -> bool:
        """Whether its holder is dead; False where it has changed hands meanwhile.

        Raises:
            ConfigError: it is alive.
        """
        alive = ConfigError(
            f"save_path: {self._folder}: is being trained by {lease.holder}; expected one run a folder: "
            "stop that one, or choose another save_path"
        )
        if lease.holder and lease.holder.kernel == _kernel():
            if not lease.locked:
                return True
            raise alive
        with tempfile.TemporaryFile(dir=self._folder) as probe:
            age = (os.fstat(probe.fileno()).st_mtime_ns - lease.touched) / 1e9
        patience = max(EXPIRY * self._interval - age, WATCH * self._interval)
        if lease.holder:
            print(f"save_path: waiting up to {patience:.0f} s for a heartbeat of {lease.holder}", flush=True)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            time.sleep(min(0.1, self._interval / 10))
            now = _read(lease.path)
            if now is None or now.holder != lease.holder:
                return False
            if now.touched != lease.touched:
                raise alive
        return True


def _leases(folder: Path) -> list[Found]:
    return [lease for path in sorted(folder.glob(NAME + "[0-9]" * 6)) if (lease := _read(path))]


def _read(path: Path) -> Found | None:
    with suppress(FileNotFoundError), open(path, "rb") as file:  # opened anew: a shared disk then looks past its cache
        holder = None
        with suppress(ValueError, TypeError):
            holder = Holder(*json.loads(file.read()))
        locked = False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several starts may look at once
        except OSError as error:
            locked = isinstance(error, BlockingIOError)
        return Found(path, holder, locked, os.fstat(file.fileno()).st_mtime_ns)
    return None


def _kernel() -> str:
    """Names the running kernel; processes that find the same name see each other's locks."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

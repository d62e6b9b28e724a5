"""A network cable that is slow, long and loses packets: two taps with this process between them.

What comes in at one end leaves at the other when it has passed a line of `rate` and then `delay`, as `tc netem` would
do it, which not every kernel has. A line that holds `QUEUE` packets loses those that come on top.
"""

from __future__ import annotations

import fcntl
import os
import queue
import random
import struct
import threading
import time
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000  # linux/if_tun.h
LARGEST = 2**16
QUEUE = 1000


class SlowLink:
    """Makes both taps in this process's network; move them to the hosts.

    Args:
        ends: names of the taps.
        delay: seconds, of each way.
        rate: bytes/s.
        loss: the share of packets that are lost.
    """

    def __init__(self, ends: tuple[str, str], delay: float, rate: float, loss: float) -> None:
        self._taps = [_tap(name) for name in ends]
        self._delay, self._rate, self._loss = delay, rate, loss
        self._closed = False
        self._threads: list[threading.Thread] = []
        for begin, end in (self._taps, self._taps[::-1]):
            line: queue.Queue[tuple[float, bytes]] = queue.Queue(QUEUE)
            self._threads += [
                threading.Thread(target=self._take, args=(begin, line), daemon=True),
                threading.Thread(target=self._give, args=(end, line), daemon=True),
            ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, once the taps are deleted."""
        self._closed = True
        for thread in self._threads:
            thread.join()
        for tap in self._taps:
            os.close(tap)

    def _take(self, tap: int, line: queue.Queue[tuple[float, bytes]]) -> None:
        generator, free = random.Random(tap), 0.0
        while not self._closed:
            try:
                packet = os.read(tap, LARGEST)
            except OSError:  # deleted, or not up yet
                time.sleep(0.01)
                continue
            if generator.random() < self._loss or line.full():
                continue
            free = max(free, time.monotonic()) + len(packet) / self._rate
            line.put((free + self._delay, packet))

    def _give(self, tap: int, line: queue.Queue[tuple[float, bytes]]) -> None:
        while not self._closed:
            with suppress(queue.Empty, OSError):  # OSError: its end is down
                due, packet = line.get(timeout=0.5)
                time.sleep(max(0.0, due - time.monotonic()))
                os.write(tap, packet)


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap

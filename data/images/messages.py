"""Hand arrays from one process to another without a copy, and without a trace when either is killed.

A message is a file in memory that has no name: the kernel keeps it as long as somebody holds it. It begins with a note
in JSON, behind which the arrays lie as they are. Neither the size of /dev/shm nor that of a pipe matters.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from typing import Any

import numpy
from numpy.typing import NDArray

ALIGNED = 64  # bytes, where an array begins


def send(channel: socket.socket, note: dict[str, Any], arrays: dict[str, NDArray[Any]] | None = None) -> None:
    """Send a note, and arrays by their names."""
    places, end = [], 0
    for name, array in (arrays or {}).items():
        places.append((name, array.dtype.str, array.shape, end))
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    text = json.dumps([note, places]).encode()
    begin = -(-len(text) // ALIGNED) * ALIGNED

    file = os.memfd_create("images", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, begin + end)
        with mmap.mmap(file, begin + end) as memory:
            memory[: len(text)] = text
            for (*_, place), array in zip(places, (arrays or {}).values(), strict=True):
                memory[begin + place : begin + place + array.nbytes] = array.data.cast("B")
        socket.send_fds(channel, [b"%d %d" % (len(text), begin)], [file])
    finally:
        os.close(file)


def receive(channel: socket.socket) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Wait for a message; None where the other process has gone. Its memory is free once the arrays are."""
    try:
        header, files, _, _ = socket.recv_fds(channel, ALIGNED, 1)
    except ConnectionError:
        return None
    if not files:
        return None
    try:
        memory = mmap.mmap(files[0], 0)
    finally:
        os.close(files[0])
    length, begin = map(int, header.split())
    note, places = json.loads(memory[:length])
    arrays = {}
    for name, kind, shape, place in places:
        count = int(numpy.prod(shape, dtype=numpy.int64))
        arrays[name] = numpy.frombuffer(memory, kind, count, begin + place).reshape(shape)
    return note, arrays

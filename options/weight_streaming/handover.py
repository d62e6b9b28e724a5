"""Hand activations, gradients and counts from one process of a host to the next, through memory that they share.

Every layer but the embedding has a place for each micro-batch of a round. The forward pass stores the layer's input
there; the backward pass recomputes the layer from it, then overwrites it with the gradient of that input. Blocks have
places for the products that they keep, too. On a GPU those of one block arrive or leave while another is computed, and
no more than these two are there.

A process counts the micro-batches that it has finished, and those that need them poll the count (`wait_until`). On a
GPU copies run on streams of their own, one each way, and a thread raises the count once the device has finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from mmap import mmap

import torch
from torch import Tensor

from options.weight_streaming.shared_memory import share_memory, share_tensors, tensor_in
from training.distributed.communication import wait_until


class Places:
    """Places of one size in memory that the ranks of a pool share."""

    def __init__(self, pool: Sequence[int], device: torch.device) -> None:
        self._pool, self._device = pool, device
        self._number = self._size = 0
        self._memory: mmap | None = None

    def make_room(self, number: int, size: int) -> None:
        """Allocate places of `size` bytes each; a collective call of all ranks, with the same arguments."""
        if number > self._number or size > self._size:
            self._number, self._size = max(number, self._number), max(size, self._size)
            self._memory = None  # freed before, as both may be too much
            self._memory = share_memory(self._number * self._size, self._pool, self._device)

    def views(self, place: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors at a place."""
        assert self._memory is not None
        views, begin = [], place * self._size
        for tensor in like:
            views.append(tensor_in(self._memory, begin, tensor))
            begin += aligned(tensor.nbytes)
        return views


class Handover:
    """Shared places for tensors and shared counts of the processes of one host.

    Args:
        pool: their ranks.
        device: the device that this process computes on.
        counts: number of counts.

    Attributes:
        arriving, leaving: streams for copies to the device and from it; None on a CPU.
        inputs, products: places of layers' inputs, and of blocks' kept products.
    """

    def __init__(self, pool: Sequence[int], device: torch.device, counts: int) -> None:
        self._pool, self._device = pool, device
        self._first_of_ranks, self._meetings = counts, 0
        like = torch.empty(counts + len(pool), dtype=torch.int64, device="meta")
        self._reached = share_tensors({"counts": like}, pool, device)["counts"].numpy()
        on_gpu = device.type == "cuda"
        self.arriving = torch.cuda.Stream(device) if on_gpu else None
        self.leaving = torch.cuda.Stream(device) if on_gpu else None
        self._thread = ThreadPoolExecutor(1, "handover") if on_gpu else None
        self._counting: Future[None] | None = None
        self.inputs, self.products = Places(pool, device), Places(pool, device)
        self._sent, self._used = deque[torch.cuda.Event](), deque[torch.cuda.Event]()

    def wait(self, number: int, value: int) -> None:
        """Wait until a count has reached a value."""
        if self._reached[number] < value:
            wait_until(partial(self.has_reached, number, value))

    def has_reached(self, number: int, value: int) -> bool:
        """Say whether a count has reached a value."""
        if self._counting and self._counting.done():
            self._counting.result()  # raises what went wrong on the device
        return bool(self._reached[number] >= value)

    def meet(self) -> None:
        """Wait until all processes of the pool have reached this call and their devices have finished (a barrier)."""
        self._meetings += 1
        self.count(self._first_of_ranks + self._pool.index(torch.distributed.get_rank()), self._meetings)
        for rank in range(len(self._pool)):
            self.wait(self._first_of_ranks + rank, self._meetings)

    def count(self, number: int, value: int) -> None:
        """Set a count once the device has finished all work and copies queued so far."""
        if self._thread is None or self.leaving is None:
            self._set(number, value)
            return
        self.leaving.wait_stream(torch.cuda.current_stream(self._device))
        self._counting = self._thread.submit(self._set_after, self.leaving.record_event(), number, value)

    def put(self, place: int, tensors: Sequence[Tensor]) -> None:
        """Copy the inputs of a layer to their place."""
        self._send(self.inputs.views(place, tensors), tensors)

    def get(self, place: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs at a place, copied to the device; on a CPU views of the shared memory."""
        return self._fetch(self.inputs.views(place, like))

    def put_products(self, place: int, products: Sequence[Tensor]) -> None:
        """Copy the kept products of a block to their place, and wait until the block before has sent its own."""
        self._send(self.products.views(place, products), products)
        if self.leaving is not None:
            _wait_for_all_but_last(self._sent, self.leaving)

    def get_products(self, place: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the kept products at a place as `get` does, once the block before the last one is computed."""
        if self.arriving is not None:
            _wait_for_all_but_last(self._used, torch.cuda.current_stream(self._device))
        return self._fetch(self.products.views(place, like))

    def _send(self, views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        if self.leaving is None:
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor)
            return
        self.leaving.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.leaving):
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
                tensor.record_stream(self.leaving)

    def _fetch(self, views: list[Tensor]) -> list[Tensor]:
        if self.arriving is None:
            return views
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self.arriving):
            found = [view.to(self._device, non_blocking=True) for view in views]
        computing.wait_stream(self.arriving)
        for tensor in found:
            tensor.record_stream(computing)
        return found

    def _set(self, number: int, value: int) -> None:
        self._reached[number] = value

    def _set_after(self, done: torch.cuda.Event, number: int, value: int) -> None:
        done.synchronize()
        self._set(number, value)


def _wait_for_all_but_last(events: deque[torch.cuda.Event], stream: torch.cuda.Stream) -> None:
    """Note what a stream has been given, and wait until it has done all but what it was given since the last note."""
    events.append(stream.record_event())
    if len(events) > 1:
        events.popleft().synchronize()


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that a place for these tensors takes."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)


def aligned(size: int) -> int:
    return -(-size // 64) * 64

"""Hand activations, gradients and counts from one process of a host to the next, through memory that they share.

Every layer but the embedding has a place for each micro-batch of a round. There lies its input, from the forward pass
on; the backward pass computes the layer again from it, and leaves the gradient of that input in its place.

A process counts what it has done, and those that need it look at the count (`wait_until`). On a GPU copies go over
streams of their own, one each way, and a thread counts when the device has done what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from training.distributed.communication import wait_until
from training.distributed.shared_memory import share_memory, share_tensors, tensor_in


class Handover:
    """What the processes of a host hand each other.

    Args:
        pool: their ranks.
        device: that computes.
        counts: how many counts there are.

    Attributes:
        arriving, leaving: streams of copies to the device and from it; None on a CPU.
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
        self._size = self._places = 0

    def make_room(self, places: int, size: int) -> None:
        """Have `places` of `size` bytes; all ranks of the run call it together, with the same numbers."""
        if places > self._places or size > self._size:
            self._places, self._size = max(places, self._places), max(size, self._size)
            self._memory = share_memory(self._places * self._size, self._pool, self._device)

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
        """Wait until all processes of the pool have come here, and their devices have done what they were given."""
        self._meetings += 1
        self.count(self._first_of_ranks + self._pool.index(torch.distributed.get_rank()), self._meetings)
        for rank in range(len(self._pool)):
            self.wait(self._first_of_ranks + rank, self._meetings)

    def count(self, number: int, value: int) -> None:
        """Set a count, when the device has done all that it was given, and copied back what it was given to copy."""
        if self._thread is None or self.leaving is None:
            self._set(number, value)
            return
        self.leaving.wait_stream(torch.cuda.current_stream(self._device))
        self._counting = self._thread.submit(self._set_after, self.leaving.record_event(), number, value)

    def put(self, place: int, tensors: Sequence[Tensor]) -> None:
        """Leave tensors at a place."""
        views = self._views(place, tensors)
        if self.leaving is None:
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor)
            return
        self.leaving.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.leaving):
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
                tensor.record_stream(self.leaving)

    def get(self, place: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors at a place, on the device; on a CPU the shared memory itself."""
        views = self._views(place, like)
        if self.arriving is None:
            return views
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self.arriving):
            found = [view.to(self._device, non_blocking=True) for view in views]
        computing.wait_stream(self.arriving)
        for tensor in found:
            tensor.record_stream(computing)
        return found

    def _views(self, place: int, like: Sequence[Tensor]) -> list[Tensor]:
        views, begin = [], place * self._size
        for tensor in like:
            views.append(tensor_in(self._memory, begin, tensor))
            begin += aligned(tensor.nbytes)
        return views

    def _set(self, number: int, value: int) -> None:
        self._reached[number] = value

    def _set_after(self, done: torch.cuda.Event, number: int, value: int) -> None:
        done.synchronize()
        self._set(number, value)


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the size of a place for such tensors."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)


def aligned(size: int) -> int:
    return -(-size // 64) * 64

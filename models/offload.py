"""Keep activations in host memory until the backward pass needs them.

What a block keeps, or only its input where the block recomputes the rest, is copied to pinned memory while the next
block computes. Values do not change. Weights, masks, rotary angles and small tensors stay on the device. What several
operations keep, as the products for queries, keys and values do, is copied once.

When the backward pass of a block begins, what the next one needs starts to come back, on a stream of its own. The next
one is the block before it or, at a chunk's first block, the last block of the next micro-batch. So for each chunk the
device holds one more block than the one in its backward pass.

Cost: two copies over the bus of all that is moved (a GPU's PCIe carries some 25 GB/s each way), beside the computation,
and as much memory on the host. On the last stage a block's backward pass follows its forward pass at once, and waits
for the last block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

LEAST = 1 << 20  # bytes; what is smaller costs more time than it frees memory


class HostCopy:
    """A tensor's numbers in host memory; the tensor itself may go."""

    def __init__(self, tensor: Tensor) -> None:
        self.uses = 1  # how often it will be needed; until the last time it stays on its device once it is back
        self._returned: Tensor | None = None
        tensor = tensor.detach()
        self._device = tensor.device
        self._done: torch.cuda.Event | None = None  # the copy that was last started
        if tensor.device.type != "cuda":
            self._copy = tensor.clone()
            return
        stream = _stream(tensor.device, "out")
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._done = stream.record_event()
        tensor.record_stream(stream)  # its memory is not used again before the copy is made

    def start_back(self) -> None:
        """Start copying back to the device, if needed."""
        if self._returned is None and self.uses > 0:
            self._returned = self._fetched()

    def back(self) -> Tensor:
        """Get the numbers on their device again; the host does not wait."""
        tensor = self._fetched() if self._returned is None else self._returned
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self.uses -= 1
        self._returned = tensor if self.uses > 0 else None
        return tensor

    def _fetched(self) -> Tensor:
        if self._done is None:
            return self._copy
        computing, stream = torch.cuda.current_stream(self._device), _stream(self._device, "back")
        tensor = torch.empty_like(self._copy, device=self._device)
        stream.wait_stream(computing)  # which may still use this memory for what was there before
        stream.wait_event(self._done)
        with torch.cuda.stream(stream):
            tensor.copy_(self._copy, non_blocking=True)
            self._done = stream.record_event()
        # If nobody needs it (a graph freed early, an exception), its memory is not reused before the copy is made.
        tensor.record_stream(stream)
        return tensor


class Trip:
    """What one block keeps of one micro-batch."""

    def __init__(self, returns: Returns, block: int) -> None:
        self.block = block
        self.copies: list[HostCopy] = []
        self._returns = returns

    def send(self, tensor: Tensor) -> HostCopy:
        if not self.copies:
            self._returns.enter(self)
        self.copies.append(HostCopy(tensor))
        return self.copies[-1]

    def fetch(self, copy: HostCopy) -> Tensor:
        """Get a tensor back; the first call starts the others and the next block's."""
        self._returns.leave(self)
        return copy.back()


class Returns:
    """A chunk's trips, in the order in which backward passes need them.

    Micro-batches have their backward passes in the order of their forward passes, and blocks in the reverse one.
    """

    def __init__(self) -> None:
        self._passes: deque[list[Trip]] = deque()  # forward passes, the oldest first

    def enter(self, trip: Trip) -> None:
        """Note that a block's forward pass has offloaded something."""
        if not self._passes or self._passes[-1][-1].block >= trip.block:
            self._passes.append([])
        self._passes[-1].append(trip)

    def leave(self, trip: Trip) -> None:
        """Start what a block's backward pass, and the next block's, needs."""
        trips = next((trips for trips in self._passes if trip in trips), None)
        if trips is None:
            return
        trips.remove(trip)
        if not trips:
            self._passes.remove(trips)
        for needed in [trip, *(self._passes[0][-1:] if self._passes else [])]:
            for copy in needed.copies:
                copy.start_back()


class Offloading(saved_tensors_hooks):
    """Offload whatever autograd saves, except what shares memory with `staying`.

    Around `checkpoint` it sees the inputs alone, as what is recomputed is not saved.
    """

    def __init__(self, staying: Iterable[Tensor], trip: Trip) -> None:
        storages = {tensor.untyped_storage().data_ptr() for tensor in staying}
        copies: dict[tuple[object, ...], HostCopy] = {}

        def leave(tensor: Tensor) -> Tensor | HostCopy:
            if tensor.nbytes < LEAST or tensor.untyped_storage().data_ptr() in storages:
                return tensor
            # A weak reference is equal to those of the same storage alone, also when its memory has another tensor.
            storage = StorageWeakRef(tensor.untyped_storage())
            same = storage, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
            if same in copies:
                copies[same].uses += 1
            else:
                copies[same] = trip.send(tensor)
            return copies[same]

        def come_back(kept: Tensor | HostCopy) -> Tensor:
            return kept if isinstance(kept, Tensor) else trip.fetch(kept)

        super().__init__(torch.compiler.disable(leave), torch.compiler.disable(come_back))


@cache
def _stream(device: torch.device, way: Literal["out", "back"]) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

"""Activations that wait for the backward pass in host memory instead of the device's.

A block's activations, or only its input where the block recomputes the rest, are copied to pinned memory while the next
block computes, and copied back when the backward pass asks for them. Values do not change. Weights, masks and rotary
angles stay where they are, as they are needed anyway, and so do small tensors. What several operations keep, as the
products for queries, keys and values keep one input, goes and comes once.

Cost: two copies over the bus of all that is moved (a GPU's PCIe carries some 25 GB/s each way), and as much memory on
the host. The copies out run beside the computation; the first block of a backward pass waits for the ones back.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

LEAST = 1 << 20  # bytes; what is smaller costs more time than it frees memory


class HostCopy:
    """A tensor's numbers in host memory; the tensor itself may go.

    Attributes:
        asked: how often it will be asked for; until the last time it stays on its device once it is back.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.asked = 1
        self._returned: Tensor | None = None
        tensor = tensor.detach()
        self._device = tensor.device
        self._done: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._copy = tensor.clone()
            return
        stream = _copying(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._done = stream.record_event()
        tensor.record_stream(stream)  # its memory is not used again before the copy is made

    def back(self) -> Tensor:
        """The numbers on their device again; the host does not wait."""
        tensor = self._fetched() if self._returned is None else self._returned
        self.asked -= 1
        self._returned = tensor if self.asked > 0 else None
        return tensor

    def _fetched(self) -> Tensor:
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        return self._copy.to(self._device, non_blocking=True)


class Parked:
    """A block's input: itself for the forward pass, its host copy for the recomputation."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._requires_grad = tensor.requires_grad
        self._copy = HostCopy(tensor)

    def take(self) -> Tensor:
        """The tensor; the first call gives it away."""
        tensor, self._tensor = self._tensor, None
        return self._copy.back().requires_grad_(self._requires_grad) if tensor is None else tensor


class Offloading(saved_tensors_hooks):
    """Whatever autograd saves inside waits in host memory, but for what shares memory with `staying`."""

    def __init__(self, staying: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr() for tensor in staying}
        copies: dict[tuple[object, ...], HostCopy] = {}

        def leave(tensor: Tensor) -> Tensor | HostCopy:
            if tensor.nbytes < LEAST or tensor.untyped_storage().data_ptr() in storages:
                return tensor
            # A weak reference is equal to those of the same storage alone, also when its memory has another tensor.
            storage = StorageWeakRef(tensor.untyped_storage())
            same = storage, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
            if same in copies:
                copies[same].asked += 1
            else:
                copies[same] = HostCopy(tensor)
            return copies[same]

        def come_back(kept: Tensor | HostCopy) -> Tensor:
            return kept if isinstance(kept, Tensor) else kept.back()

        super().__init__(torch.compiler.disable(leave), torch.compiler.disable(come_back))


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream on which copies leave a device."""
    return torch.cuda.Stream(device)

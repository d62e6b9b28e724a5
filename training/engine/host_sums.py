"""Keep the sums of gradients in host memory (`offload_gradients`), beside the optimizer that steps there.

A gradient is added on the GPU, as in any other run and so to the same bits: a piece of the sum comes over the bus, is
added to and goes back, each way on a stream of its own, while the backward pass computes the next gradient. In a step's
first micro-batch nothing comes. The host never waits. The device holds `BUFFERS` pieces; it waits only where more than
`AHEAD` bytes of gradients have not been added yet, so that a slow bus costs time and not memory.

To add on the host instead would take half the bus (16 bits one way), but 12 bytes of the host's memory traffic a
parameter and micro-batch where this takes 8, and a thread that waits for copies: eight GPUs share that memory, and its
bandwidth is the first to run out.

A weight's sum lies where DeepSpeed's optimizer reads its gradient, if this replica owns the whole weight, and so takes
no memory of its own. At the end of a step one weight after the other comes back to be summed over replicas and the ends
of a tied model, measured and rounded by DeepSpeed, as without the key.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from itertools import cycle
from mmap import mmap
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from training.engine.gradients import add

PIECE = 2**23  # numbers that cross the bus at a time
BUFFERS = 4
AHEAD = 2**28  # bytes


@dataclass
class _Sum:
    total: Tensor  # flat, on the host
    begun: bool = False  # whether this step has added to it
    arrived: torch.cuda.Event | None = None  # all of it is on the host


class HostSums:
    """The gradient sums of a rank; replaces DeepSpeed's own in its ZeRO optimizer with CPU offload."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._device, self._sums = device, dict[Tensor, _Sum]()
        self._attribute = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
        dtype = optimizer.gradient_accumulation_dtype
        for weights, master in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            master.grad = page_locked(master.numel(), master.dtype, device)
            places = {weight: optimizer.grad_position.get(optimizer.get_param_id(weight)) for weight in weights}
            whole = {weight: at for weight, at in places.items() if at and at[3] == weight.numel()}
            if master.dtype.itemsize < dtype.itemsize:
                whole = {}

            others = page_locked(sum(weight.numel() for weight in weights if weight not in whole), dtype, device)
            begin = 0
            for weight in weights:
                if weight in whole:
                    total = master.grad[whole[weight][2] :][: weight.numel()].view(dtype)[: weight.numel()]
                else:
                    total, begin = others[begin:][: weight.numel()], begin + weight.numel()
                self._sums[weight] = _Sum(total)

        optimizer._get_offload_gradient_dict()  # of the new memory
        if device.type == "cuda":
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
            pieces = [torch.empty(PIECE, dtype=dtype, device=device) for _ in range(BUFFERS)]
            self._buffers = cycle([(piece, self._out.record_event()) for piece in pieces])
            self._ahead: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # gradients, and when they are added
        optimizer.process_gradients = self._take
        found = optimizer.get_gradient_for_reduction

        def brought_back(weight: Tensor) -> Tensor | None:
            self._bring_back(weight)
            gradient: Tensor | None = found(weight)
            return gradient

        optimizer.get_gradient_for_reduction = brought_back

    @torch.no_grad()
    def _take(self, weight: Tensor, _: int) -> None:
        """Add a micro-batch's gradient; DeepSpeed's hook calls it when one is there."""
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        flat, found = gradient.reshape(-1), self._sums[weight]
        begun, found.begun = found.begun, True
        if self._device.type != "cuda":
            add(found.total, flat) if begun else found.total.copy_(flat)
            return
        computing = torch.cuda.current_stream(self._device)
        computed = computing.record_event()
        if begun and found.arrived:
            self._in.wait_event(found.arrived)
        for total, part in zip(found.total.split(PIECE), flat.split(PIECE), strict=True):
            buffer, left = next(self._buffers)
            piece = buffer[: len(part)]
            with torch.cuda.stream(self._in):
                self._in.wait_event(left)
                if begun:
                    piece.copy_(total, non_blocking=True)
                self._in.wait_event(computed)
                piece.add_(part) if begun else piece.copy_(part)
            added = self._in.record_event()
            with torch.cuda.stream(self._out):
                self._out.wait_event(added)
                total.copy_(piece, non_blocking=True)
                left.record(self._out)

        found.arrived = self._out.record_event()
        self._ahead.append((flat, added))
        while sum(each.nbytes for each, _ in self._ahead) > AHEAD and len(self._ahead) > 1:
            self._forget_oldest(computing)

    def _forget_oldest(self, computing: torch.cuda.Stream) -> None:
        """Give the memory of a gradient to what is computed once it has been added."""
        computing.wait_event(self._ahead[0][1])
        self._ahead.popleft()

    def _bring_back(self, weight: Tensor) -> None:
        """Put a step's sum on the device, where DeepSpeed looks for it."""
        found = self._sums[weight]
        if not found.begun:
            return
        found.begun = False
        if found.arrived:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(found.arrived)
            while self._ahead:
                self._forget_oldest(computing)
        there = torch.empty(weight.shape, dtype=found.total.dtype, device=self._device)
        setattr(weight, self._attribute, there.copy_(found.total.view(weight.shape), non_blocking=True))


def page_locked(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros in host memory that `device` reads and writes by itself.

    They take whole pages of their own, where torch's pinned memory is rounded up to a power of two.
    """
    pages = mmap(-1, max(1, numbers * dtype.itemsize))
    lock_pages(pages, device)
    return torch.frombuffer(pages, dtype=dtype, count=numbers) if numbers else torch.empty(0, dtype=dtype)


def lock_pages(memory: mmap, device: torch.device) -> None:
    """Let a GPU read and write host memory by itself, until it is freed."""
    if device.type == "cuda":
        begin = torch.frombuffer(memory, dtype=torch.uint8)
        get_accelerator().register_host_memory(begin.data_ptr(), len(memory))
        weakref.finalize(memory, get_accelerator().unregister_host_memory, begin.data_ptr()).atexit = False

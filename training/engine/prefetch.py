"""Copy micro-batches to the device, one ahead of the computation.

While the device works on one micro-batch, the next is made, pinned and copied on a stream of its own, so neither host
nor device waits for a copy. The positions of trained tokens are found on the host too: on the device, the host would
wait for their number. Cost: the token ids of one more micro-batch. On a CPU there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from data.loader import MicroBatch
from models.loss import supervised_positions

Sent = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def prefetch(micro_batches: Iterator[MicroBatch], device: torch.device) -> Iterator[Sent]:
    """Yield micro-batches on `device`, each copied while the one before it is computed.

    They are `((input_ids, position_ids), (labels, scale, share, positions of trained tokens))`.
    """
    complete = (
        (inputs, (*labels, supervised_positions(labels[0], inputs[0].shape[1]))) for inputs, labels in micro_batches
    )
    if device.type != "cuda":
        yield from complete
        return
    stream = torch.cuda.Stream(device)
    coming: tuple[Sent, torch.cuda.Event] | None = None
    for micro_batch in complete:
        with torch.cuda.stream(stream):
            sent: Sent = tree_map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), micro_batch)
            here, coming = coming, (sent, stream.record_event())
        if here is not None:
            yield _wait_for_copy(*here)
    if coming is not None:
        yield _wait_for_copy(*coming)


def _wait_for_copy(micro_batch: Sent, copied: torch.cuda.Event) -> Sent:
    """Make the current stream wait for the copy of a micro-batch; the host does not wait."""
    tensors: list[Tensor] = tree_leaves(micro_batch)
    current = torch.cuda.current_stream(tensors[0].device)
    current.wait_event(copied)
    for tensor in tensors:
        tensor.record_stream(current)
    return micro_batch

"""Connect the training loop to an engine: steps and evaluations, timed, with micro-batches on their way to the device.

`training.engine.pipeline` implements it for the pipeline, `training.engine.zero` for ZeRO. Both see the same global
batches and compute the same numbers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from data.collation import Carried, Collation
from data.loader import GlobalBatch, Loader, MicroBatch
from models.attention.packed import Documents
from models.loss.interface import supervised_positions
from models.parallel.groups import NO_GROUPS, RankGroups
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.topology import Division

PARTS = ("data", "forward_backward", "optimizer", "checkpoint")

Item = TypeVar("Item")
# ((input_ids, position_ids, ...), (labels, scale, share, ..., positions of trained tokens)), on the device
Sent = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


class Timings:
    """Measure `PARTS` of a step: `with timings("data"): ...`, then `timings.take()`.

    Parts may be nested, as the pipeline engine fetches data and steps the optimizer inside its schedule; time counts
    for the innermost. On a GPU nothing waits for kernels: work queued in one part counts for the part that first needs
    its result. Cost: two clock readings per part, under a microsecond.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time of the block for `part`."""
        self._switch()
        self._open.append(part)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def each(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, and count the time it takes to make them for `part`."""
        iterator = iter(items)
        while True:
            with self(part):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def take(self) -> dict[str, float]:
        """Return and reset the seconds of each part; call it outside all parts."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost part."""
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


class Trainer(ABC):
    """One rank's share of the model in a DeepSpeed engine; all ranks call each method, with the same global batch.

    Attributes:
        in_stages: whether the layers are divided among the stages of a pipeline.
        replica: number, from 0, of this rank's replica of the model or of its stage.
        groups: process groups that share this rank's sequences and layers.
        stage: of the pipeline, from 0.
    """

    in_stages: ClassVar[bool]

    def __init__(self, engine: Any, replica: int, groups: RankGroups = NO_GROUPS, stage: int = 0) -> None:
        self.engine = engine
        self.replica = replica
        self.groups = groups
        self.stage = stage
        self.timings = Timings()

    @classmethod
    @abstractmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> Trainer:
        """Load this rank's weights, make the optimizer and wrap both in DeepSpeed's engine.

        Args:
            folder: of the weights, in either layout; not read with `from_scratch`.
            division: the layers of each stage, and those that recompute.

        Raises:
            RunRefused: on every rank, if some rank's weights or settings are unusable.
        """

    @abstractmethod
    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """Take one optimizer step; return the mean loss of the batch's trained tokens, the same on all ranks."""

    def take_step(self, step: Callable[[], None]) -> None:
        """Have the optimizer take its step, once in each `train_step`."""
        with self.timings("optimizer"):
            step()

    @abstractmethod
    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """Return the mean cross-entropy of a batch's trained tokens, without dropout and auxiliary losses."""

    @abstractmethod
    def write_layers(self, folder: Path, save: Callable[[Any, str], object], disk: Disk) -> None:
        """Write the layer files of the pipeline layout that DeepSpeed does not write by itself.

        Args:
            save: writes a state dict to a path; it must not raise, as the ranks work together.
            disk: receives all layers of its ranks.
        """

    def micro_batches(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        """Yield this rank's micro-batches on the device; first set batch size and expected documents."""
        # The number of micro-batches may change with each batch, and DeepSpeed averages over the number set here.
        samples = batch.n_micro_batches * loader.micro_batch_size * loader.replicas
        self.engine.set_train_batch_size(samples * self.groups.sequence.size)
        documents = self.documents(loader, batch)
        for positions in self.engine.module.positions:
            positions.expect(documents)
        return self.send(loader, batch)

    def documents(self, loader: Loader, batch: GlobalBatch) -> list[Documents]:
        """List the documents of this rank's micro-batches, with what all stages know of their tokens."""
        layouts = loader.layouts(batch, self.row_replica)
        marks = loader.collation.marks(loader, batch, self.row_replica)
        return [Documents.laid_out(*layout).seeing(*each) for layout, each in zip(layouts, marks, strict=True)]

    def send(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        """Yield this rank's micro-batches on the device."""
        return prefetch(self.on_host(loader, batch), self.engine.device)

    def on_host(self, loader: Loader, batch: GlobalBatch) -> Iterator[MicroBatch]:
        """Yield what this rank has of its replica's micro-batches."""
        loader.feeds_embedding = self.stage == 0
        micro_batches = loader.tensors(batch, self.row_replica)
        if self.groups.sequence.size == 1:
            return micro_batches
        return map(partial(self._own_tokens, loader.collation), micro_batches)

    @property
    def row_replica(self) -> int:
        """This rank's replica for the loader, where ranks that share sequences count as one."""
        return self.replica // self.groups.sequence.size

    def _own_tokens(self, collation: Collation, micro_batch: MicroBatch) -> MicroBatch:
        """Take this rank's tokens of shared sequences [B, S], with the label behind them and all positions.

        The loss is averaged over all ranks, so each rank's sum is scaled by the number of ranks that share sequences.
        """
        (input_ids, position_ids, *to_first), (labels, scale, share, *to_last) = micro_batch
        ranks = self.groups.sequence
        own = ranks.part(input_ids.shape[1])
        first, last = collation.part(Carried(tuple(to_first), tuple(to_last)), labels, own, ranks.size)
        known = labels[:, own.start : own.stop + 1]
        return (input_ids[:, own], position_ids, *first), (known, scale * ranks.size, share, *last)


def prefetch(micro_batches: Iterator[MicroBatch], device: torch.device) -> Iterator[Sent]:
    """Yield micro-batches on `device`, each copied while the one before it is computed.

    The next one is made, pinned and copied on a stream of its own, so neither host nor device waits for a copy. The
    positions of trained tokens are found on the host too: on the device, the host would wait for their number. Cost:
    the token ids of one more micro-batch.
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

"""The interface between the training loop and an engine.

`training.engine.pipeline` implements it for the pipeline, `training.engine.zero` for ZeRO. Both see the same global
batches and compute the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from data.loader import GlobalBatch, Loader, MicroBatch
from models.attention.packed import Documents
from models.process_groups import NO_GROUPS, RankGroups
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.engine.prefetch import Sent, prefetch
from training.engine.timings import Timings
from training.topology import Division


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
        documents = [Documents.laid_out(*layout) for layout in loader.layouts(batch, self.row_replica)]
        for positions in self.engine.module.positions:
            positions.expect(documents)
        micro_batches = loader.tensors(batch, self.row_replica)
        if self.groups.sequence.size > 1:
            micro_batches = map(self._own_tokens, micro_batches)
        return prefetch(micro_batches, self.engine.device)

    @property
    def row_replica(self) -> int:
        """This rank's replica for the loader, where ranks that share sequences count as one."""
        return self.replica // self.groups.sequence.size

    def _own_tokens(self, micro_batch: MicroBatch) -> MicroBatch:
        """Take this rank's tokens of shared sequences [B, S], with the label behind them and all positions.

        The loss is averaged over all ranks, so each rank's sum is scaled by the number of ranks that share sequences.
        """
        (input_ids, position_ids), (labels, scale, share) = micro_batch
        ranks = self.groups.sequence
        own = ranks.part(input_ids.shape[1])
        known = labels[:, own.start : own.stop + 1]
        return (input_ids[:, own], position_ids), (known, scale * ranks.size, share)

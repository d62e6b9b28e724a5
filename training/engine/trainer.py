"""The interface of an engine to the training loop, however the model is spread.

`training.engine.pipeline` is the pipeline, `training.engine.zero` is ZeRO. Both see the same global batches and give
the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from data.loader import GlobalBatch, Loader, MicroBatch
from models.attention.packed import Documents
from models.process_groups import NONE_SHARED, Sharing
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.engine.prefetch import Sent, ahead
from training.engine.timings import Timings
from training.topology import Division


class Trainer(ABC):
    """One rank's share of the model in a DeepSpeed engine. All ranks call each method, with the same global batch.

    Attributes:
        in_stages: whether the layers are divided among the stages of a pipeline.
        replica: the number, from 0, of the replica of the model or of a stage that this rank is.
        sharing: with whom it shares its rows and its layers.
        stage: of the pipeline, from 0.
    """

    in_stages: ClassVar[bool]

    def __init__(self, engine: Any, replica: int, sharing: Sharing = NONE_SHARED, stage: int = 0) -> None:
        self.engine = engine
        self.replica = replica
        self.sharing = sharing
        self.stage = stage
        self.timings = Timings()

    @classmethod
    @abstractmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> Trainer:
        """Load this rank's weights, make the optimizer and wrap both in DeepSpeed's engine.

        Args:
            folder: of the weights, in either layout; nothing is read with `from_scratch`.
            division: the layers that each stage holds, and those that recompute.

        Raises:
            RunRefused: on every rank, when some rank's weights or settings are unusable.
        """

    @abstractmethod
    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """One optimizer step; the loss, a mean over the global batch's supervised tokens, the same on all ranks."""

    @abstractmethod
    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch; no gradient, no dropout, no further terms."""

    @abstractmethod
    def write_layers(self, folder: Path, save: Callable[[Any, str], object], disk: Disk) -> None:
        """Write the layer files of the pipeline layout that DeepSpeed does not write by itself.

        Args:
            save: writes a state dict to a path; it does not raise, as the ranks work together.
            disk: on which all layers of its ranks are to be.
        """

    def micro_batches(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        """This rank's micro-batches, on their way to the device; engine and model are told what comes."""
        # No two batches need have as many micro-batches, and DeepSpeed averages over as many as it is told.
        samples = batch.n_micro_batches * loader.micro_batch_size * loader.replicas
        self.engine.set_train_batch_size(samples * self.sharing.sequence.size)
        documents = [Documents.laid_out(*layout) for layout in loader.layouts(batch, self.rows)]
        for positions in self.engine.module.positions:
            positions.expect(documents)
        micro_batches = loader.tensors(batch, self.rows)
        if self.sharing.sequence.size > 1:
            micro_batches = map(self._own_tokens, micro_batches)
        return ahead(micro_batches, self.engine.device)

    @property
    def rows(self) -> int:
        """Whose rows this rank works on: those that share them count as one replica for the loader."""
        return self.replica // self.sharing.sequence.size

    def _own_tokens(self, micro_batch: MicroBatch) -> MicroBatch:
        """Of shared rows [B, S] this rank's tokens, and the label that follows them; positions are those of whole rows.

        The loss is averaged over all ranks, so a part of the tokens' sum counts once for each that shares the rows.
        """
        (input_ids, position_ids), (labels, scale, share) = micro_batch
        peers = self.sharing.sequence
        own = peers.part(input_ids.shape[1])
        known = labels[:, own.start : own.stop + 1]
        return (input_ids[:, own], position_ids), (known, scale * peers.size, share)

"""The pipeline as the training loop sees it."""

from __future__ import annotations

from pathlib import Path

from deepspeed.runtime.pipe.engine import PipelineEngine

from data.loader import GlobalBatch, Loader


class PipelineTrainer:
    """A stage of the pipeline; the first and last ones turn their replica's part of a batch into tensors."""

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine = engine

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """One optimizer step on a global batch; its loss, the mean over the batch's supervised tokens."""
        # An epoch's last batch may have fewer micro-batches; DeepSpeed averages over as many as it is told.
        self.engine.set_train_batch_size(batch.n_micro_batches * loader.micro_batch_size * loader.replicas)
        return float(self.engine.train_batch(loader.tensors(batch, self.engine.grid.get_data_parallel_id())))

    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch."""
        micro_batches = loader.tensors(batch, self.engine.grid.get_data_parallel_id())
        loss = self.engine.eval_batch(micro_batches, num_micro_batches=batch.n_micro_batches)
        self.engine.module.train()
        return float(loss)

    def write_layers(self, folder: Path) -> None:
        """DeepSpeed writes one file a layer already."""

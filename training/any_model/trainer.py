"""The engine behind a `Pipeline`, as the training loop sees it: a `PipelineTrainer` of any layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from data.loader import GlobalBatch, Loader
from training.any_model.config import PipelineConfig
from training.any_model.layers import ForwardStep, Layer, Loss
from training.any_model.samples import SampleLoader
from training.any_model.stage import LayerStage, LayerStageEngine
from training.distributed.groups import among_members
from training.engine.building import wrap
from training.engine.pipeline import PipelineTrainer
from training.engine.prefetch import Sent


class LayerTrainer(PipelineTrainer):
    """A stage of layers that a user brought."""

    engine: LayerStageEngine

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        forward_step: ForwardStep,
        loss: Loss,
        loader: SampleLoader,
        config: PipelineConfig,
        parts: Sequence[int],
        folder: Path | None = None,
    ) -> LayerTrainer:
        """Make this process's layers and the optimizer, and wrap both in DeepSpeed's engine.

        Args:
            forward_step, loss: see `Pipeline`.
            loader: whose first micro-batch has the shapes of all.
            parts: layers per stage.
            folder: a checkpoint whose weights the layers take.
        """
        with among_members():
            stage = LayerStage(layers, forward_step, loss, config, parts, folder)
        stage.learn(next(loader.micro_batches(loader.batch(0), 0))[0])
        torch.manual_seed(config.seed + torch.distributed.get_rank())  # dropout differs from rank to rank
        return cls(LayerStageEngine.adopt(wrap(stage, config)))

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """Batch statistics and the like are those of the first replica afterwards, as a checkpoint has them."""
        loss, grid = super().train_step(loader, batch), self.engine.grid
        if len(grid.dp_group) > 1:
            kept = self.engine.module.state_dict(keep_vars=True).values()
            for buffer in [tensor for tensor in kept if not isinstance(tensor, torch.nn.Parameter)]:
                torch.distributed.broadcast(buffer, grid.dp_group[0], grid.get_data_parallel_group())
        return loss

    def micro_batches(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        assert isinstance(loader, SampleLoader)
        self.engine.expect([()] * batch.n_micro_batches)  # all are alike
        return loader.micro_batches(batch, self.replica)

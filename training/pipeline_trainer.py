"""The pipeline as the training loop sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from data.loader import GlobalBatch, Loader
from models.documents import Documents
from models.spec import ModelSpec
from training.checkpoint_folder import Topology
from training.config import TrainConfig
from training.engine import build_engine, divide
from training.plan.workload import Workload
from training.prefetch import Sent, ahead
from training.stage_engine import StageEngine
from training.timings import Timings


class PipelineTrainer:
    """A stage of the pipeline; the first and last ones turn their replica's part of a batch into tensors."""

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self.stage: int = engine.stage_id
        self.timings = Timings()
        engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {schedule.OptimizerStep: self._take_optimizer_step}

    @classmethod
    def check(cls, config: TrainConfig, spec: ModelSpec) -> None:
        """The number of stages and the list of `parts`, if there is one."""
        config.parts_for(spec.n_layers)

    @classmethod
    def topology(cls, config: TrainConfig, spec: ModelSpec, workload: Workload | None = None) -> Topology:
        """See `training.engine.divide`."""
        return divide(config, spec, workload)

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, total_steps: int) -> PipelineTrainer:
        """See `training.engine.build_engine`."""
        return cls(build_engine(config, spec, folder, total_steps))

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """One optimizer step on a global batch; its loss, the mean over the batch's supervised tokens."""
        micro_batches = self._announce(loader, batch)
        with self.timings("forward_backward"):
            return float(self.engine.train_batch(self.timings.each("data", micro_batches)))

    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch."""
        micro_batches = self._announce(loader, batch)
        loss = self.engine.eval_batch(micro_batches, num_micro_batches=batch.n_micro_batches)
        self.engine.module.train()
        return float(loss)

    def write_layers(self, folder: Path) -> None:
        """DeepSpeed writes one file a layer already."""

    def _announce(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        """Tell the engine how many micro-batches come and how large they are; this replica's, as tensors."""
        # No two batches need have as many micro-batches; DeepSpeed averages over as many as it is told.
        self.engine.set_train_batch_size(batch.n_micro_batches * loader.micro_batch_size * loader.replicas)
        replica = self.engine.grid.get_data_parallel_id()
        self.engine.expect(loader.shapes(batch, replica))
        documents = [Documents.laid_out(*layout) for layout in loader.layouts(batch, replica)]
        for positions in self.engine.module.positions:
            positions.expect(documents)
        return ahead(loader.tensors(batch, replica), self.engine.device)

    def _take_optimizer_step(self, engine: PipelineEngine, lr_kwargs: Any = None) -> None:
        with self.timings("optimizer"):
            PipelineEngine._exec_optimizer_step(engine, lr_kwargs)

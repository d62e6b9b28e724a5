"""The pipeline as the training loop sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from data.loader import GlobalBatch, Loader
from models.spec import ModelSpec
from training.checkpoint_folder import Topology
from training.config import TrainConfig
from training.engine import build_engine
from training.timings import Timings


class PipelineTrainer:
    """A stage of the pipeline; the first and last ones turn their replica's part of a batch into tensors."""

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine = engine
        self.stage: int = engine.stage_id
        self.timings = Timings()
        engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {schedule.OptimizerStep: self._take_optimizer_step}

    @classmethod
    def topology(cls, config: TrainConfig, spec: ModelSpec) -> Topology:
        """Stages, replicas and layers per stage, checked."""
        topo = config.model_topo
        parts = config.parts_for(spec.n_layers)
        return Topology(
            stages=topo.stages, replicas=topo.replicas, zero_stage=config.zero_optimization.stage, parts=parts
        )

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, total_steps: int) -> PipelineTrainer:
        """See `training.engine.build_engine`."""
        return cls(build_engine(config, spec, folder, total_steps))

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """One optimizer step on a global batch; its loss, the mean over the batch's supervised tokens."""
        # An epoch's last batch may have fewer micro-batches; DeepSpeed averages over as many as it is told.
        self.engine.set_train_batch_size(batch.n_micro_batches * loader.micro_batch_size * loader.replicas)
        micro_batches = loader.tensors(batch, self.engine.grid.get_data_parallel_id())
        with self.timings("forward_backward"):
            return float(self.engine.train_batch(self.timings.each("data", micro_batches)))

    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch."""
        micro_batches = loader.tensors(batch, self.engine.grid.get_data_parallel_id())
        loss = self.engine.eval_batch(micro_batches, num_micro_batches=batch.n_micro_batches)
        self.engine.module.train()
        return float(loss)

    def write_layers(self, folder: Path) -> None:
        """DeepSpeed writes one file a layer already."""

    def _take_optimizer_step(self, engine: PipelineEngine, lr_kwargs: Any = None) -> None:
        with self.timings("optimizer"):
            PipelineEngine._exec_optimizer_step(engine, lr_kwargs)

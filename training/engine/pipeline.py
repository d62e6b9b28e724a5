"""The pipeline as the training loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology

from data.loader import GlobalBatch, Loader
from models.documents import Documents
from models.pipeline import PipelineModel, VScheduleModel
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.engine.dualpipev import VScheduleEngine
from training.engine.prefetch import Sent, ahead
from training.engine.stage_engine import StageEngine
from training.engine.timings import Timings
from training.engine.trainer import build_engine
from training.topology import Division


class PipelineTrainer:
    """A stage of the pipeline; the first and last ones turn their replica's part of a batch into tensors."""

    in_stages: ClassVar[bool] = True

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self.stage: int = engine.stage_id
        self.timings = Timings()
        engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {schedule.OptimizerStep: self._take_optimizer_step}

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> PipelineTrainer:
        """See `Trainer.build`."""
        grid, topology = config.model_topo.process_topology, division.topology
        processes = ProcessTopology(axes=list(grid.axes), dims=list(grid.dims))
        layers = topology.layers(processes.get_coord(torch.distributed.get_rank()).pipe, spec.n_layers)
        model_class, engine_class = (
            (VScheduleModel, VScheduleEngine) if topology.v_schedule else (PipelineModel, StageEngine)
        )
        make_model = partial(model_class, spec=spec, topology=processes, parts=topology.parts)
        engine = build_engine(config, spec, folder, layers, make_model, division.recompute)
        return cls(engine_class.adopt(engine))

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

    def write_layers(self, folder: Path, save: Callable[[Any, str], object]) -> None:
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

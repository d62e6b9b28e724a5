"""The pipeline as the training loop sees it, and how a checked config becomes DeepSpeed's engine for a stage of it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology

from data.loader import GlobalBatch, Loader
from models.checkpoint.source import open_source
from models.documents import Documents
from models.loading import LayerStates, SeededStates
from models.pipeline import FoldedModel, PipelineModel
from models.spec import ModelSpec
from training.config.deepspeed_config import check_device, deepspeed_config, router_loss_weight, training_dtype
from training.config.keys import TrainConfig
from training.distributed.processes import agreed
from training.engine.dualpipev import FoldedEngine
from training.engine.prefetch import Sent, ahead
from training.engine.stage_engine import StageEngine
from training.engine.timings import Timings
from training.optimizer.optimizers import build_optimizer, build_scheduler
from training.plan.parts import choose_parts
from training.plan.workload import Workload
from training.recompute import block_options, recomputed_on
from training.topology import Topology


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
        """Which layers each stage holds; all ranks call it together."""
        return divide(config, spec, workload)

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, total_steps: int) -> PipelineTrainer:
        """See `build_engine`."""
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


def divide(config: TrainConfig, spec: ModelSpec, workload: Workload | None = None) -> Topology:
    """Which layers each stage holds. All ranks call it together.

    Args:
        workload: what the data are like, for `parts: auto`; assumed where absent.

    Raises:
        ConfigError: the config and the model do not fit each other.
    """
    topo = config.model_topo
    parts = choose_parts(config, spec, workload)
    return Topology(stages=topo.stages, replicas=topo.replicas, zero_stage=config.zero_optimization.stage, parts=parts)


def build_engine(config: TrainConfig, spec: ModelSpec, folder: Path, total_steps: int) -> StageEngine:
    """Build this process's stage, load its weights and wrap it in DeepSpeed's engine.

    Args:
        folder: the resolved `model_path`.
        total_steps: optimizer steps of the whole run, for the schedule.

    Raises:
        RunRefused: on every rank, when some rank's weights or settings are unusable.
    """
    topo = config.model_topo
    topology = ProcessTopology(axes=list(topo.process_topology.axes), dims=list(topo.process_topology.dims))
    divided = divide(config, spec)
    with agreed():
        check_device(config)
        router_weight = router_loss_weight(config, spec)
        states: LayerStates = SeededStates(spec, config.seed) if config.from_scratch else open_source(folder, spec)
        stage = topology.get_coord(torch.distributed.get_rank()).pipe
        # Building a stage communicates, so every rank looks at its weights before any begins.
        for layer in divided.layers(stage, spec.n_layers):
            states.check_layer(layer)
    torch.manual_seed(config.seed + torch.distributed.get_rank())  # dropout differs from rank to rank
    model_class, engine_class = (FoldedModel, FoldedEngine) if config.folded else (PipelineModel, StageEngine)
    model = model_class(
        spec,
        states,
        topology,
        divided.parts,
        training_dtype(config),
        blocks=block_options(config, recomputed_on(config, spec, divided, [stage])[0]),
        z_loss_weight=config.aux_max_z_loss.weight,
        router_loss_weight=router_weight,
    )
    with agreed():
        optimizer = build_optimizer(config, model.named_parameters(), spec.tied_names)
    scheduler = build_scheduler(config, optimizer, total_steps)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the memory in use, four times
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=deepspeed_config(config)
        )
    return engine_class.adopt(engine)

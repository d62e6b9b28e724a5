"""The trainer of a model divided into pipeline stages."""

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
from models.checkpoint.layout import layer_file
from models.parallel.groups import NO_GROUPS, RankGroups, add_up
from models.parallel.tensor import TensorShare
from models.pipeline import PipelineModel, VScheduleModel
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.gpu_progress import followed
from training.distributed.processes import gather
from training.engine.building import build_engine, copy_to_cpu, make_groups
from training.engine.replica_sums import ReplicaSums
from training.engine.stage_engine import StageEngine, VScheduleEngine
from training.engine.trainer import Sent, Trainer
from training.topology import Division


class PipelineTrainer(Trainer):
    """A stage of the pipeline; the first and the last one make the tensors of their replica's micro-batches."""

    in_stages = True
    stage_engine: ClassVar[type[StageEngine]] = StageEngine
    engine: StageEngine

    def __init__(self, engine: StageEngine, groups: RankGroups = NO_GROUPS) -> None:
        super().__init__(engine, engine.grid.get_data_parallel_id(), groups, engine.stage_id)
        # This number names the checkpoint's files; DeepSpeed's depends on the order of the axes.
        engine.checkpoint_mp_rank = self.stage * groups.tensor.size + groups.tensor.rank
        engine._INSTRUCTION_MAP = followed(
            engine._INSTRUCTION_MAP | {schedule.OptimizerStep: self._take_optimizer_step}, groups != NO_GROUPS
        )

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> PipelineTrainer:
        grid, topology = config.model_topo.process_topology, division.topology
        # An axis of size 1 would change the names of DeepSpeed's files.
        axes = {axis: size for axis, size in zip(grid.axes, grid.dims, strict=True) if axis != "model" or size > 1}
        processes = ProcessTopology(axes=list(axes), dims=list(axes.values()))
        layers = topology.layers(processes.get_coord(torch.distributed.get_rank()).pipe, spec.n_layers)
        model_class, engine_class = (
            (VScheduleModel, VScheduleEngine) if topology.v_schedule else (PipelineModel, cls.stage_engine)
        )
        groups = make_groups(config.model_topo)
        make_model = partial(
            model_class, spec=spec, topology=processes, parts=topology.parts, spread_experts=topology.spread
        )
        engine = build_engine(config, spec, folder, layers, make_model, division, groups)
        trainer = cls(engine_class.adopt(engine), groups)
        if config.sums_while_computing:
            ReplicaSums(engine)
        return trainer

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        micro_batches = self.micro_batches(loader, batch)
        with self.timings("forward_backward"):
            return float(self.engine.train_batch(self.timings.each("data", micro_batches)))

    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        micro_batches = self.micro_batches(loader, batch)
        loss = self.engine.eval_batch(micro_batches, num_micro_batches=batch.n_micro_batches)
        self.engine.module.train()
        return float(loss)

    def write_layers(self, folder: Path, save: Callable[[Any, str], object], disk: Disk) -> None:
        """Write this stage's layers on disks without the first replica, which DeepSpeed has write.

        Processes that share layers gather them first.
        """
        named = {int(name): layer for name, layer in self.engine.module.named_children() if name.isdecimal()}
        if self.engine.grid.model_parallel_size > 1:
            share: TensorShare = self.engine.module.share
            stages = gather(self.stage)
            writes = self.stage not in [stages[rank] for rank in disk.ranks[: disk.number]]
            if add_up(torch.tensor(int(writes), device=self.engine.device), share.ranks):
                for number, layer in named.items():
                    whole = share.whole(number, layer, writes)
                    if writes:
                        save(whole, str(folder / layer_file(number)))
        elif self.replica > 0 and self.engine.save_non_zero_checkpoint:
            for number, layer in named.items():
                save(copy_to_cpu(layer), str(folder / layer_file(number)))

    def micro_batches(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        self.engine.expect(loader.shapes(batch, self.row_replica))
        return super().micro_batches(loader, batch)

    def _take_optimizer_step(self, engine: PipelineEngine, lr_kwargs: Any = None) -> None:
        self.take_step(partial(PipelineEngine._exec_optimizer_step, engine, lr_kwargs))

"""ZeRO as the training loop sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from data.loader import GlobalBatch, Loader
from models.checkpoint.layer_files import save_state_dict
from models.checkpoint.layout import layer_file
from models.documents import Documents
from models.spec import ModelSpec
from training.checkpoint_folder import Topology
from training.config import TrainConfig
from training.errors import ConfigError
from training.plan.workload import Workload
from training.prefetch import Sent, ahead
from training.timings import Timings
from training.zero_engine import build_zero_engine


class ZeroTrainer:
    """A replica of the model, whole or in shards; it trains on its part of each global batch."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.stage = 0
        self.timings = Timings()

    @classmethod
    def check(cls, config: TrainConfig, spec: ModelSpec) -> None:
        """There is one stage."""
        topo = config.model_topo
        if topo.stages > 1:
            raise ConfigError(
                f"model_topo.process_topology.dims: {topo.process_topology.dims} asks for {topo.stages} stages; "
                "ZeRO has no pipeline: expected 1 for pipe, or no model_topo"
            )

    @classmethod
    def topology(cls, config: TrainConfig, spec: ModelSpec, workload: Workload | None = None) -> Topology:
        """One stage, as many replicas as processes."""
        stage = config.zero_optimization.stage
        return Topology(stages=1, replicas=config.model_topo.replicas, zero_stage=stage, parts=[])

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, total_steps: int) -> ZeroTrainer:
        """See `training.zero_engine.build_zero_engine`."""
        return cls(build_zero_engine(config, spec, folder, total_steps))

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """One optimizer step on a global batch; its loss, the mean over the batch's supervised tokens."""
        # An epoch's last batch may have fewer micro-batches, so DeepSpeed can neither divide by the number that the
        # config says nor find the last micro-batch by counting.
        self.engine.set_train_batch_size(batch.n_micro_batches * loader.micro_batch_size * loader.replicas)
        losses = []
        micro_batches = self.timings.each("data", self._announce(loader, batch))
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self.timings("forward_backward"):
                self.engine.set_gradient_accumulation_boundary(number == batch.n_micro_batches)
                loss = self.engine(*micro_batch)
                self.engine.backward(loss)
            losses.append(loss.detach())
        with self.timings("optimizer"):
            self.engine.step()
        return self._mean(losses)

    @torch.no_grad()
    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch."""
        self.engine.eval()
        loss = self._mean([self.engine(*micro_batch) for micro_batch in self._announce(loader, batch)])
        self.engine.train()
        return loss

    def write_layers(self, folder: Path) -> None:
        """Write the layer files of the pipeline layout.

        The ranks take the layers in turn and write side by side, so each holds one whole layer at most.
        """
        sharded = self.engine.zero_optimization_stage() == 3
        rank, ranks = self.engine.global_rank, self.engine.world_size
        layers = list(self.engine.module)
        for first in range(0, len(layers), ranks):
            mine: dict[str, Tensor] = {}
            for owner, layer in enumerate(layers[first : first + ranks]):
                with deepspeed.zero.GatheredParameters(list(layer.parameters()), enabled=sharded):
                    if owner == rank:
                        mine = {
                            name: tensor.detach().to("cpu", copy=True) for name, tensor in layer.state_dict().items()
                        }
            if mine:
                save_state_dict(mine, folder / layer_file(first + rank))

    def _announce(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        """Tell the model which documents come; this rank's micro-batches, on their way to the device."""
        rank = self.engine.global_rank
        self.engine.module.positions.expect(Documents.laid_out(*layout) for layout in loader.layouts(batch, rank))
        return ahead(loader.tensors(batch, rank), self.engine.device)

    def _mean(self, losses: list[Tensor]) -> float:
        """The mean over micro-batches and ranks."""
        mean = torch.stack(losses).mean() / self.engine.world_size
        torch.distributed.all_reduce(mean)
        return float(mean)

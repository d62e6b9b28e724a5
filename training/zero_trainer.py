"""ZeRO as the training loop sees it."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from data.loader import GlobalBatch, Loader
from models.checkpoint.layer_files import save_state_dict
from models.checkpoint.layout import layer_file
from models.spec import ModelSpec
from training.checkpoint_folder import Topology
from training.config import TrainConfig
from training.errors import ConfigError
from training.timings import Timings
from training.zero_engine import build_zero_engine


class ZeroTrainer:
    """A replica of the model, whole or in shards; it trains on its part of each global batch."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.stage = 0
        self.timings = Timings()

    @classmethod
    def topology(cls, config: TrainConfig, spec: ModelSpec) -> Topology:
        """One stage, as many replicas as processes, checked."""
        topo = config.model_topo
        if topo.stages > 1:
            raise ConfigError(
                f"model_topo.process_topology.dims: {topo.process_topology.dims} asks for {topo.stages} stages; "
                "ZeRO has no pipeline: expected 1 for pipe, or no model_topo"
            )
        return Topology(stages=1, replicas=topo.replicas, zero_stage=config.zero_optimization.stage, parts=[])

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
        micro_batches = self.timings.each("data", loader.tensors(batch, self.engine.global_rank))
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self.timings("forward_backward"):
                self.engine.set_gradient_accumulation_boundary(number == batch.n_micro_batches)
                loss = self.engine(*_to(self.engine.device, micro_batch))
                self.engine.backward(loss)
            losses.append(loss.detach())
        with self.timings("optimizer"):
            self.engine.step()
        return self._mean(losses)

    @torch.no_grad()
    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch."""
        self.engine.eval()
        micro_batches = loader.tensors(batch, self.engine.global_rank)
        loss = self._mean([self.engine(*_to(self.engine.device, micro_batch)) for micro_batch in micro_batches])
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

    def _mean(self, losses: list[Tensor]) -> float:
        """The mean over micro-batches and ranks."""
        mean = torch.stack(losses).mean() / self.engine.world_size
        torch.distributed.all_reduce(mean)
        return float(mean)


def _to(device: torch.device, micro_batch: tuple[tuple[Tensor, ...], ...]) -> list[tuple[Tensor, ...]]:
    return [tuple(tensor.to(device, non_blocking=True) for tensor in part) for part in micro_batch]

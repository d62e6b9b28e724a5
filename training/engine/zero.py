"""The trainer of plain ZeRO: each process has the whole model, with its state sharded.

Stage 0 shards nothing, 1 the optimizer, 2 the gradients too, 3 the weights as well. Cost of stage 3: every layer is
gathered from all processes in each forward and each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from data.loader import GlobalBatch, Loader
from models.checkpoint.layout import layer_file
from models.sharded import ShardedModel
from models.spec import ModelSpec
from training.config.deepspeed_config import deepspeed_config
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.engine.building import build_engine, copy_to_cpu, make_groups
from training.engine.gradients import clip
from training.engine.trainer import Trainer
from training.topology import Division


class ZeroTrainer(Trainer):
    """A replica of the model, whole or sharded, which trains on its part of each global batch."""

    in_stages = False
    engine: DeepSpeedEngine

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> ZeroTrainer:
        stage = config.zero_optimization.stage
        make_model = partial(ShardedModel, spec=spec, shards=deepspeed_config(config) if stage == 3 else None)
        groups = make_groups(config.model_topo)
        engine = build_engine(config, spec, folder, range(spec.n_layers), make_model, division, groups)
        if stage == 0:
            engine.clip_fp32_gradients = MethodType(_clip_gradients, engine)
            if config.bf16.enabled:
                _undo_empty_step(engine)
        return cls(engine, engine.global_rank, groups)

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        losses = []
        micro_batches = self.timings.each("data", self.micro_batches(loader, batch))
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self.timings("forward_backward"):
                # DeepSpeed's count is of no use, as an epoch's last batch may have fewer micro-batches.
                self.engine.set_gradient_accumulation_boundary(number == batch.n_micro_batches)
                loss = self.engine(*micro_batch)
                self.engine.backward(loss)
            losses.append(loss.detach())
        self.take_step(self.engine.step)
        return self._mean(losses)

    @torch.no_grad()
    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        self.engine.eval()
        loss = self._mean([self.engine(*micro_batch) for micro_batch in self.micro_batches(loader, batch)])
        self.engine.train()
        return loss

    def write_layers(self, folder: Path, save: Callable[[Any, str], object], disk: Disk) -> None:
        """Write layers in turn with the other ranks of the disk, so each rank holds at most one whole layer."""
        sharded = self.engine.zero_optimization_stage() == 3
        rank, ranks = disk.number, len(disk.ranks)
        layers = list(self.engine.module)
        for first in range(0, len(layers), ranks):
            mine: dict[str, Tensor] | None = None
            for owner, layer in enumerate(layers[first : first + ranks]):
                with deepspeed.zero.GatheredParameters(list(layer.parameters()), enabled=sharded):
                    if owner == rank:
                        mine = copy_to_cpu(layer)
            if mine is not None:  # it may be empty: with adapters, of a layer that trains nothing
                save(mine, str(folder / layer_file(first + rank)))

    def _mean(self, losses: list[Tensor]) -> float:
        """Return the mean over micro-batches and ranks."""
        mean = torch.stack(losses).mean() / self.engine.world_size
        torch.distributed.all_reduce(mean)
        return float(mean)


def _clip_gradients(engine: DeepSpeedEngine) -> None:
    """Clip and store the norm, which DeepSpeed does not in fp32 without ZeRO; drop gradients that are not finite."""
    weights = list(engine.module.parameters())
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    engine._global_grad_norm = norm
    if norm.isfinite():
        clip(engine.optimizer, weights, engine.gradient_clipping(), norm)
    else:
        engine.zero_grad()


@torch.no_grad()
def _undo_empty_step(engine: DeepSpeedEngine) -> None:
    """Undo the step without gradients with which DeepSpeed's 16-bit optimizer creates its state.

    It would count as the first step, and decay the weights.
    """
    optimizer = engine.optimizer
    optimizer.optimizer.state.clear()
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.copy_(weight)

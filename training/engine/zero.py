"""ZeRO as the training loop sees it: the whole model in each process, its state sharded.

Stage 0 shards nothing, 1 the optimizer, 2 the gradients too, 3 the weights as well. Cost of stage 3: every layer is
gathered from all processes in each forward and in each backward pass.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from data.loader import GlobalBatch, Loader
from models.checkpoint.layout import layer_file
from models.checkpoint.source import open_source
from models.documents import Documents
from models.loading import LayerStates, SeededStates
from models.sharded import ShardedModel
from models.spec import ModelSpec
from training.config.deepspeed_config import check_device, deepspeed_config, router_loss_weight, training_dtype
from training.config.keys import TrainConfig
from training.distributed.processes import agreed
from training.engine.prefetch import Sent, ahead
from training.engine.timings import Timings
from training.errors import ConfigError
from training.optimizer.optimizers import build_optimizer, build_scheduler
from training.plan.workload import Workload
from training.recompute import block_options, recomputed
from training.topology import Topology


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
        """See `build_zero_engine`."""
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

    def write_layers(self, folder: Path, save: Callable[[Any, str], object]) -> None:
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
                save(mine, str(folder / layer_file(first + rank)))

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


def build_zero_engine(config: TrainConfig, spec: ModelSpec, folder: Path, total_steps: int) -> DeepSpeedEngine:
    """Build this process's share of the model, load its weights and wrap it in DeepSpeed's engine.

    Args:
        folder: the resolved `model_path`.
        total_steps: optimizer steps of the whole run, for the schedule.

    Raises:
        RunRefused: on every rank, when the weights or settings are unusable.
    """
    with agreed():
        check_device(config)
        router_weight = router_loss_weight(config, spec)
        states: LayerStates = SeededStates(spec, config.seed) if config.from_scratch else open_source(folder, spec)
        # Sharding communicates, so every rank looks at the weights before any begins.
        for layer in range(spec.n_layers):
            states.check_layer(layer)
    torch.manual_seed(config.seed + torch.distributed.get_rank())  # dropout differs from rank to rank
    settings = deepspeed_config(config)
    stage = config.zero_optimization.stage
    model = ShardedModel(
        spec,
        states,
        training_dtype(config),
        settings if stage == 3 else None,
        blocks=block_options(config, recomputed(config.use_grad_ckpt, spec.n_blocks)),
        z_loss_weight=config.aux_max_z_loss.weight,
        router_loss_weight=router_weight,
    )
    with agreed():
        optimizer = build_optimizer(config, model.named_parameters(), spec.tied_names)
    scheduler = build_scheduler(config, optimizer, total_steps)
    engine: DeepSpeedEngine
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the memory in use
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings)
    if stage == 0:
        engine.clip_fp32_gradients = MethodType(_clip_gradients, engine)
        if config.bf16.enabled:
            _undo_empty_step(engine)
    return engine


def _clip_gradients(engine: DeepSpeedEngine) -> None:
    """Clip and remember the norm, which DeepSpeed forgets in fp32 without ZeRO; drop a gradient that is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())
    engine._global_grad_norm = norm
    if not norm.isfinite():
        engine.zero_grad()


@torch.no_grad()
def _undo_empty_step(engine: DeepSpeedEngine) -> None:
    """Take back the step without gradients by which DeepSpeed's 16-bit optimizer makes its state.

    It would count as the first one and decay the weights.
    """
    optimizer = engine.optimizer
    optimizer.optimizer.state.clear()
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.copy_(weight)

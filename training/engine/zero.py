"""ZeRO as the training loop sees it: the whole model in each process, its state sharded.

Stage 0 shards nothing, 1 the optimizer, 2 the gradients too, 3 the weights as well. Cost of stage 3: every layer is
gathered from all processes in each forward and in each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from data.loader import GlobalBatch, Loader
from models.checkpoint.layout import layer_file
from models.documents import Documents
from models.sharded import ShardedModel
from models.spec import ModelSpec
from training.config.deepspeed_config import deepspeed_config
from training.config.keys import TrainConfig
from training.engine.prefetch import Sent, ahead
from training.engine.timings import Timings
from training.engine.trainer import build_engine
from training.topology import Division


class ZeroTrainer:
    """A replica of the model, whole or in shards; it trains on its part of each global batch."""

    in_stages: ClassVar[bool] = False

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.stage = 0
        self.timings = Timings()

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> ZeroTrainer:
        """See `Trainer.build`."""
        stage = config.zero_optimization.stage
        make_model = partial(ShardedModel, spec=spec, shards=deepspeed_config(config) if stage == 3 else None)
        layers = range(spec.n_layers)
        engine = build_engine(config, spec, folder, layers, make_model, division.recompute)
        if stage == 0:
            engine.clip_fp32_gradients = MethodType(_clip_gradients, engine)
            if config.bf16.enabled:
                _undo_empty_step(engine)
        return cls(engine)

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

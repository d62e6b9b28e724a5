"""From a checked config to a DeepSpeed engine that runs the whole model in each process, its state sharded by ZeRO.

Stage 0 shards nothing, 1 the optimizer, 2 the gradients too, 3 the weights as well. Cost of stage 3: every layer is
gathered from all processes in each forward and in each backward pass.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import MethodType

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from models.checkpoint.source import open_source
from models.loading import LayerStates, SeededStates
from models.sharded import ShardedModel
from models.spec import ModelSpec
from training.config import TrainConfig
from training.deepspeed_config import check_device, deepspeed_config, router_loss_weight, training_dtype
from training.distributed import agreed
from training.optim import build_optimizer, build_scheduler
from training.recompute import block_options, recomputed


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

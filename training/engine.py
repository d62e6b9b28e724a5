"""From a checked config to a DeepSpeed pipeline engine that is ready for its first step."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.pipe.topology import ProcessTopology

from models.checkpoint.source import open_source
from models.loading import LayerStates, SeededStates
from models.pipeline import FoldedModel, PipelineModel
from models.spec import ModelSpec
from training.checkpoint_folder import Topology
from training.config import TrainConfig
from training.deepspeed_config import check_device, deepspeed_config, router_loss_weight, training_dtype
from training.distributed import agreed
from training.dualpipev import FoldedEngine
from training.optim import build_optimizer, build_scheduler
from training.plan.parts import choose_parts
from training.plan.workload import Workload
from training.recompute import block_options, recomputed_on
from training.stage_engine import StageEngine


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

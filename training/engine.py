"""From a checked config to a DeepSpeed pipeline engine that is ready for its first step."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor

from models.checkpoint.source import open_source
from models.loading import LayerStates, SeededStates
from models.pipeline import PipelineModel
from models.spec import ModelSpec
from training.config import TrainConfig
from training.deepspeed_config import check_device, deepspeed_config, router_loss_weight, training_dtype
from training.distributed import agreed
from training.optim import build_optimizer, build_scheduler


def build_engine(config: TrainConfig, spec: ModelSpec, folder: Path, total_steps: int) -> PipelineEngine:
    """Build this process's stage, load its weights and wrap it in DeepSpeed's engine.

    Args:
        folder: the resolved `model_path`.
        total_steps: optimizer steps of the whole run, for the schedule.

    Raises:
        RunRefused: on every rank, when some rank's weights or settings are unusable.
    """
    topo = config.model_topo
    topology = ProcessTopology(axes=list(topo.process_topology.axes), dims=list(topo.process_topology.dims))
    with agreed():
        check_device(config)
        parts = config.parts_for(spec.n_layers)
        router_weight = router_loss_weight(config, spec)
        states: LayerStates = SeededStates(spec, config.seed) if config.from_scratch else open_source(folder, spec)
        stage = topology.get_coord(torch.distributed.get_rank()).pipe
        # Building a stage communicates, so every rank looks at its weights before any begins.
        for layer in range(sum(parts[:stage]), sum(parts[: stage + 1])):
            states.check_layer(layer)
    torch.manual_seed(config.seed + torch.distributed.get_rank())  # dropout differs from rank to rank
    model = PipelineModel(
        spec,
        states,
        topology,
        parts,
        training_dtype(config),
        recompute=config.use_grad_ckpt,
        z_loss_weight=config.aux_max_z_loss.weight,
        router_loss_weight=router_weight,
    )
    with agreed():
        optimizer = build_optimizer(config, model.named_parameters(), spec.tied_names)
    engine: PipelineEngine
    scheduler = build_scheduler(config, optimizer, total_steps)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the memory in use, four times
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=deepspeed_config(config)
        )
    engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {
        schedule.ReduceTiedGrads: _sum_tied_gradients,
        schedule.BackwardPass: _backward_once,
    }
    engine._allocate_or_extend_buffers = MethodType(_allocate_buffer, engine)
    if hasattr(engine.optimizer, "scaled_global_norm"):
        _count_uneven_groups(engine)
    if config.zero_optimization.stage == 0:
        engine.clip_fp32_gradients = MethodType(_clip_by_global_norm, engine)
    return engine


class _Joined(torch.autograd.Function):
    """One tensor that stands for several: its backward pass is theirs, with the gradients that are given."""

    @staticmethod
    def forward(context: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        context.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *context.gradients


def _backward_once(engine: PipelineEngine, buffer_id: int) -> None:
    """Run one backward pass for all tensors that a stage sent on.

    DeepSpeed runs one for each. Where hidden states and router sums flow, that would be twice the work, and ZeRO's
    hooks would count each gradient as whole when only the first part of it is there.
    """
    outputs = engine.pipe_buffers["outputs"][buffer_id]
    if isinstance(outputs, tuple) and not engine.is_last_stage():
        differentiable = [tensor for tensor in outputs if tensor.is_floating_point()]
        joined = _Joined.apply(engine.grad_layer, *differentiable)
        engine.pipe_buffers["outputs"][buffer_id] = joined
        engine.grad_layer = torch.ones_like(joined)
    PipelineEngine._exec_backward_pass(engine, buffer_id)


def _allocate_buffer(engine: PipelineEngine, index: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor that another stage sends.

    DeepSpeed keeps one buffer a position, large enough but of whatever dtype came first: in a stream of floats and
    integers, a gradient would be received as int64.
    """
    return torch.empty(shape, dtype=dtype, device=engine.device)


def _sum_tied_gradients(engine: PipelineEngine) -> None:
    """Add up the gradients of the two ends of a tied model, wherever the optimizer keeps them.

    DeepSpeed looks only where its bf16 optimizer or torch keeps them; ZeRO with fp32 accumulation (CPU offload) uses
    `grad_accum`, and the ends would drift apart.
    """
    for weight, group in engine.module.get_tied_weights_and_groups():
        gradient = weight._hp_grad if engine.using_bf16_optimizer else getattr(weight, "grad_accum", None)
        torch.distributed.all_reduce(weight.grad if gradient is None else gradient, group=group)


def _count_uneven_groups(engine: PipelineEngine) -> None:
    """Let the norm of the gradient be computed where the stages have different numbers of parameter groups.

    DeepSpeed 0.19.8 sums each group's part over the stages in an operation of its own: a stage without weights that
    `no_wd_kws` matches takes part in one less, and all wait for ever.
    """
    optimizer = engine.optimizer
    own = len(optimizer.bit16_groups)
    most = torch.tensor(own, device=engine.device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)

    def norm() -> Tensor:
        parts = []
        for group in range(int(most)):
            parameters = optimizer.params_in_partition[group] if group < own else []
            if optimizer.cpu_offload:
                parts.append(optimizer.complete_grad_norm_calculation_for_cpu_offload(parameters))
            else:
                gradients = optimizer.averaged_gradients[group] if group < own else []
                parts.append(optimizer.get_grad_norm_direct(gradients, parameters))
        return combine_grad_norm_groups(parts)

    optimizer.scaled_global_norm = norm


@torch.no_grad()
def _clip_by_global_norm(engine: PipelineEngine) -> None:
    """Clip by the norm over all stages. Without ZeRO, DeepSpeed clips each stage of an fp32 run by its own norm.

    A gradient that is not finite is dropped, as DeepSpeed does with ZeRO.
    """
    parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
    counted = [parameter for parameter in parameters if not parameter.ds_pipe_replicated]
    squares = torch.stack([parameter.grad.float().square().sum() for parameter in counted]).sum()
    torch.distributed.all_reduce(squares, group=engine.grid.get_pipe_parallel_group())
    norm = squares.sqrt()
    engine._global_grad_norm = norm
    if not norm.isfinite():
        engine.zero_grad()
        return
    scale = torch.clamp(engine.gradient_clipping() / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(scale)

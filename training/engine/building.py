"""Build an engine: weights, optimizer and DeepSpeed around them, for the pipeline and for ZeRO."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups as deepspeed_groups
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from models.block_options import BlockOptions
from models.parallel.groups import NO_GROUPS, ONE_RANK, RankGroup, RankGroups
from models.spec import ModelSpec
from training.config.deepspeed_config import check_device, deepspeed_config, router_loss_weight
from training.config.gpu import check_gpu
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo
from training.config.precision import training_dtype
from training.distributed.communication import among_members
from training.distributed.processes import agreed
from training.engine.embedding_gradients import add_rows_alone
from training.engine.gradients import clip_in_update, sum_without_copies
from training.engine.host_sums import HostSums
from training.errors import ConfigError
from training.optimizer.optimizers import build_optimizer
from training.topology import Division
from training.trained import initial_states

Model = TypeVar("Model", bound=nn.Module)
Made = TypeVar("Made", bound=Any)


def build_engine(
    config: TrainConfig,
    spec: ModelSpec,
    folder: Path,
    layers: Sequence[int],
    make_model: Callable[..., nn.Module],
    division: Division,
    groups: RankGroups,
) -> Any:
    """Build the model and DeepSpeed's engine around it, for `Trainer.build`; arguments as of `build_model`."""
    return wrap_in_engine(
        build_model(config, spec, folder, layers, make_model, division, groups), config, spec.shared_names
    )


def build_model(
    config: TrainConfig,
    spec: ModelSpec,
    folder: Path,
    layers: Sequence[int],
    make_model: Callable[..., Model],
    division: Division,
    groups: RankGroups = NO_GROUPS,
) -> Model:
    """Build this process's share of a model.

    Args:
        layers: numbers of this process's layers, in the order of building.
        make_model: takes the keyword arguments that `models.pipeline` and `models.sharded` have in common.
        groups: the process groups that share this process's sequences and layers.
    """
    with agreed():
        check_gpu(config)
        check_device(config)
        router_weight = router_loss_weight(config, spec)
        states = initial_states(config, spec, folder)
        # Building the model communicates, so every rank checks its weights before any begins.
        for layer in layers:
            states.check_layer(layer)
    # With a disk on each host, the first replica's reads are in the page cache for the others there.
    together = config.storage == "shared" and config.model_topo.replicas > 1 and not config.from_scratch
    # Dropout differs between ranks, but not between ranks that share layers or sequences.
    torch.manual_seed(config.seed + config.model_topo.first_peer(torch.distributed.get_rank()))
    with among_members():
        return make_model(
            states=states,
            dtype=training_dtype(config),
            blocks=BlockOptions(
                division.recompute, config.offload_activations, config.compile is True, config.fp8.enabled
            ),
            micro_batch_loss=config.objective.loss(router_weight),
            groups=groups,
            read_together=layers if together else (),
        )


def wrap_in_engine(model: nn.Module, config: TrainConfig, shared_names: Sequence[Sequence[str]] = ()) -> Any:
    """Wrap this rank's layers and their optimizer in DeepSpeed's engine; `shared_names` as in `parameter_groups`."""
    with agreed():
        trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
        optimizer = build_optimizer(config, trained, shared_names)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the memory in use four times
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(config))
    except (AssertionError, NotImplementedError, ValueError) as error:  # keys that do not fit each other or the device
        raise ConfigError(f"DeepSpeed refuses its keys: {error}") from None
    sum_without_copies(engine.optimizer)
    if engine.zero_optimization_stage() <= 1:
        add_rows_alone(model)
    if config.offload_gradients:
        HostSums(engine.optimizer, engine.device)
    clip_in_update(engine.optimizer)
    if config.model_topo.replicas == 1:  # DeepSpeed would copy the gradients, round sums to 16 bits, and copy them back
        engine._reduce_non_expert_gradients = lambda *_: None
    return engine


@contextmanager
def for_a_while(build: Callable[[], Made]) -> Iterator[Made]:
    """Build a trainer and free what it holds after the block; all ranks do it together.

    Weights go by themselves, as DeepSpeed's engines lie in reference cycles that Python does not see; and so do groups,
    as an engine takes those of the one before it for its own.
    """
    before, known = dict(vars(deepspeed_groups)), set(distributed_c10d._world.pg_map)
    trainer = build()
    yield trainer
    for weight in (*trainer.engine.module.parameters(), *trainer.engine.module.buffers()):
        for held in (weight, getattr(weight, "ds_tensor", weight)):  # a slice, under ZeRO stage 3
            held.data = torch.empty(0, dtype=held.dtype, device=held.device)
    vars(trainer.engine).clear()
    vars(deepspeed_groups).update(before)
    for group in [group for group in distributed_c10d._world.pg_map if group not in known]:
        torch.distributed.destroy_process_group(group)
    gc.collect()
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def copy_to_cpu(layer: nn.Module) -> dict[str, Tensor]:
    """Copy a layer's state dict to host memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in layer.state_dict().items()}


def make_groups(topology: ModelTopo) -> RankGroups:
    """Make the process groups that share this process's sequences and layers; all ranks call it together."""
    return RankGroups(
        sequence=make_group(topology.sharing("rows")),
        tensor=make_group(topology.sharing("layers")),
    )


def make_group(groups: NDArray[Any], backend: str | None = None) -> RankGroup:
    """Make this process's group, of ranks [groups, size]; all ranks call it together."""
    if (size := groups.shape[1]) == 1:
        return ONE_RANK
    rank, own = torch.distributed.get_rank(), ONE_RANK
    with among_members():
        for row in groups.tolist():
            group = torch.distributed.new_group(row, backend=backend)  # every process must call it for every group
            if rank in row:
                own = RankGroup(size, row.index(rank), group)
    return own

"""Load a checkpoint's optimizer state on any topology: stages, parts, replicas, tensor axis, ZeRO stage, offload.

The weights come from the layer files, which do not depend on the topology. The optimizer's state (fp32 weights,
moments) is in DeepSpeed's files, sharded like the run that wrote them. Each rank lists the slices of the weights that
it updates and those in the files (`training.checkpoint.saved_slices`), and copies its own, bit for bit, without
communication. The optimizer's settings come from the config. docs/design-notes.md says why DeepSpeed's own ways fail.

Cost: each rank reads its share of the state once, from mapped files. 163M parameters in bf16 from [2, 1] to [1, 2] on
two cores, 2 GB of cached state: 0.7 to 1.9 s. With many replicas there are many small reads.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from tqdm import tqdm

from models.adapters import IDLE
from models.checkpoint.layout import not_found
from models.errors import CheckpointError
from models.parallel.shard import in_common
from models.parallel.tensor import TensorShare
from models.spec import ModelSpec
from training.checkpoint.folder import CheckpointRecord
from training.checkpoint.saved_slices import SavedOptimizer, Slice, equal_shares, layer_of


@runtime_checkable
class UpdatesPieces(Protocol):
    """An engine that knows by itself what its optimizer updates."""

    def slices(self) -> list[Slice]: ...


def load_optimizer_state(
    engine: DeepSpeedEngine, folder: Path, record: CheckpointRecord, spec: ModelSpec | None = None
) -> None:
    """Copy a checkpoint's optimizer state and loss scale into an engine that already has its weights.

    Args:
        spec: of a language model.
    """
    saved = SavedOptimizer(folder, record.topology, spec)
    alike = spec.shared_names if spec else engine.module.shared_names
    wanted: dict[str, list[Slice]] = defaultdict(list)
    missing = Counter[str]()  # how many elements of each weight's state are still to come
    for piece in slices_of(engine):
        name = _saved_name(piece.name, saved, alike)
        wanted[name].append(piece)
        missing[name] += piece.numel

    hidden = torch.distributed.get_rank() > 0 or not sys.stderr.isatty()
    with tqdm(desc="optimizer states", total=sum(missing.values()), unit_scale=True, disable=hidden) as bar:
        for stage in _stages_with(wanted, saved):
            for source in saved.slices(stage):
                for piece in wanted.get(source.name, ()):
                    copied = _copy(source, piece, engine.basic_optimizer)
                    missing[source.name] -= copied
                    bar.update(copied)

    for name in (name for name, numel in missing.items() if numel):
        for path in saved.files_elsewhere(record.topology.stage_of(layer_of(name))):
            raise not_found(path)
        raise CheckpointError(f"{folder}: the optimizer's state of {name} is not whole; expected all of it")

    engine.global_steps = record.step
    if engine.fp16_enabled():
        engine.optimizer.loss_scaler = saved.loss_scaler()


def _stages_with(names: Iterable[str], saved: SavedOptimizer) -> Sequence[int]:
    """List the stages that had something of these weights."""
    if saved.in_pieces:
        return range(saved.topology.stages)
    return sorted({saved.topology.stage_of(layer_of(name)) for name in names})


def _saved_name(name: str, saved: SavedOptimizer, alike: Sequence[Sequence[str]]) -> str:
    """Return the name under which a weight was saved: that of the first of the layers that share it on a stage.

    Where each process had a piece of every weight, that of the first of all.
    """

    def stage_of(other: str) -> int:
        return 0 if saved.in_pieces else saved.topology.stage_of(layer_of(other))

    names = next((names for names in alike if name in names), [name])
    return next(other for other in names if stage_of(other) == stage_of(name))


def _in_common(source: Slice, target: Slice) -> Iterator[tuple[Any, Any, int]]:
    """Yield where the flattened masters of two slices have the elements that they share, and how many these are.

    Either is one range, or a list of indices if their shards differ.
    """
    if source.shard == target.shard:
        begin = max(source.offset, target.offset)
        numel = min(source.offset + source.numel, target.offset + target.numel) - begin
        if numel > 0:
            first, second = (piece.start + begin - piece.offset for piece in (source, target))
            yield slice(first, first + numel), slice(second, second + numel), numel
    elif not (source.shard and target.shard) or source.shard.meets(target.shard):
        wanted, known = ((piece.shard, piece.offset, piece.numel) for piece in (target, source))
        for there, here in in_common(wanted, known):
            yield here + (source.start - source.offset), there + (target.start - target.offset), len(here)


@torch.no_grad()
def _copy(source: Slice, target: Slice, optimizer: torch.optim.Optimizer) -> int:
    """Copy the elements that two slices of a weight share; return their number."""
    copied = 0
    kept = {name: values for name, values in source.state.items() if isinstance(values, Tensor) and values.dim()}
    for here, there, numel in _in_common(source, target):
        _put(target.master, there, source.master, here)
        for name, values in kept.items():
            if values.numel() < source.master.numel():  # a row or a column of Adafactor, which has whole weights
                target.state[name] = values.to(target.master.device, copy=True)
                continue
            if name not in target.state:
                target.state[name] = torch.zeros_like(target.master, dtype=target.states_in)
            _put(target.state[name], there, values, here)
        copied += numel
    if kept and copied:
        _set_step(source, target, optimizer)
    return copied


def _put(target: Tensor, there: Any, source: Tensor, here: Any) -> None:
    """Copy elements between two flattened tensors."""
    values = source.view(-1)[here]
    if isinstance(there, slice):
        target.view(-1)[there].copy_(values)
    else:
        target.view(-1)[there.to(target.device)] = values.to(target.device, target.dtype)


def _set_step(source: Slice, target: Slice, optimizer: torch.optim.Optimizer) -> None:
    """Set the number of updates as the optimizer counts them: DeepSpeed's in an integer, torch's in a tensor."""
    step = source.state.get("step")
    if type(optimizer).__module__.startswith("deepspeed."):
        target.state["step"] = int(step or 0)  # its Lion counts for nothing
    elif step is not None:
        device = target.master.device if optimizer.defaults.get("fused") else "cpu"
        target.state["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)


def slices_of(engine: DeepSpeedEngine) -> list[Slice]:
    """List the slices that this rank updates, in the optimizer's order; none of a stage that trains nothing."""
    share: TensorShare | None = getattr(engine.module, "share", None)
    held = (piece for piece in _held(engine) if piece.name != IDLE)
    return [replace(piece, shard=share.shard(piece.name) if share else None) for piece in held]


def _held(engine: DeepSpeedEngine) -> list[Slice]:
    optimizer = engine.optimizer
    if isinstance(engine, UpdatesPieces):
        return engine.slices()
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(_of_stage_3(optimizer, engine.global_rank, engine.world_size))
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(_of_ranges(optimizer, optimizer.bit16_groups))
    if isinstance(optimizer, BF16_Optimizer):
        return list(_of_ranges(optimizer, optimizer.bf16_groups))
    masters = [group["params"] for group in optimizer.param_groups]
    weights = optimizer.fp16_groups if isinstance(optimizer, FP16_UnfusedOptimizer) else masters
    slices = []
    pairs = zip(chain.from_iterable(masters), chain.from_iterable(weights), strict=True)
    for master, weight in pairs:
        name = engine.param_names[weight]
        state = engine.basic_optimizer.state[master]
        slices.append(Slice(name, 0, weight.numel(), master, 0, state))
    return slices


def _of_ranges(optimizer: Any, weights: list[list[Tensor]]) -> Iterator[Slice]:
    for group, members in zip(optimizer.param_groups, weights, strict=True):
        (master,) = group["params"]
        state = optimizer.optimizer.state[master]
        for weight in members:
            place: Any = weight
            if place._hp_mapping is not None:  # else another replica has it
                here, there = place._hp_mapping.hp_fragment_address, place._hp_mapping.lp_fragment_address
                yield Slice(optimizer.param_names[weight], there.start, here.numel, master, here.start, state)


def _of_stage_3(optimizer: Any, rank: int, ranks: int) -> Iterator[Slice]:
    for master, members in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        sizes = [(optimizer.param_names[weight], weight.ds_numel) for weight in members]
        yield from equal_shares(sizes, rank, ranks, master, optimizer.optimizer.state[master])

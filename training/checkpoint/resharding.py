"""Taking up a checkpoint, whatever topology it was saved on: stages, parts, replicas, ZeRO stage, offload.

The weights come from the layer files, which do not depend on the topology. What the optimizer keeps (fp32 weights,
moments) lies in DeepSpeed's files, cut in the way of the run that wrote them. Each rank knows which ranges of which
weights it updates (`training.checkpoint.live_shards`), and what the files hold (`training.checkpoint.saved_shards`),
and copies what is its own, bit for bit. The settings of the optimizer are those of the run's own config: none come from
the files. Nothing is converted: no folder is written that could be left over, and no rank talks to another.

Cost: each rank reads its share of the state once, from mapped files, and holds nothing but what it will train with.
163M parameters in bf16 from [2, 1] to [1, 2] on two cores, 2 GB of state in the system's cache: 0.7 to 1.9 s, where
DeepSpeed's own way takes 4.4 s, as it reads into memory first. A rank opens the files of all replicas of the stages it
needs, so from many replicas to many there are many small reads.

Why not what DeepSpeed has: it reads only the topology that it wrote, a pipeline in bf16 without ZeRO not even then, and
takes settings and schedule from the files. Its universal checkpoint writes the whole state once more (84 GB for 7B
parameters under AdamW), its converter knows no optimizer but Adam and no run without ZeRO, and both unpickle.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from tqdm import tqdm

from models.errors import CheckpointError
from models.spec import ModelSpec
from training.checkpoint.folder import CheckpointRecord
from training.checkpoint.live_shards import Slice, slices_of
from training.checkpoint.saved_shards import MASTER, SavedOptimizer, SavedSlice


def take_over(engine: DeepSpeedEngine, folder: Path, record: CheckpointRecord, spec: ModelSpec) -> None:
    """Copy a checkpoint's optimizer state and loss scale into an engine that has its weights already.

    Raises:
        CheckpointError: the files do not hold all that this rank needs.
    """
    saved = SavedOptimizer(folder, record.topology)
    wanted: dict[str, list[Slice]] = defaultdict(list)
    for piece in slices_of(engine):
        wanted[_saved_name(piece.name, record, spec)].append(piece)
    missing = {name: sum(piece.numel for piece in pieces) for name, pieces in wanted.items()}
    shown = torch.distributed.get_rank() == 0 and sys.stderr.isatty()
    with tqdm(desc="optimizer states", total=sum(missing.values()), unit_scale=True, disable=not shown) as bar:
        for stage in sorted({saved.stage_of(name) for name in wanted}):
            for source in saved.slices(stage):
                for piece in wanted.get(source.name, ()):
                    copied = _copy(source, piece, engine.basic_optimizer)
                    missing[source.name] -= copied
                    bar.update(copied)
    incomplete = [name for name, numel in missing.items() if numel]
    if incomplete:
        raise CheckpointError(f"{folder}: the optimizer's state of {incomplete[0]} is not whole; expected all of it")
    engine.global_steps = record.step
    if engine.fp16_enabled():
        engine.optimizer.loss_scaler = saved.loss_scaler()


def _saved_name(name: str, record: CheckpointRecord, spec: ModelSpec) -> str:
    """Under which name a weight was saved: where one process held both ends of a tied model, they had one."""
    together = record.topology.stage_of(0) == record.topology.stage_of(spec.n_layers - 1)
    if together and spec.tied_names and name == spec.tied_names[1]:
        return spec.tied_names[0]
    return name


@torch.no_grad()
def _copy(source: SavedSlice, piece: Slice, optimizer: torch.optim.Optimizer) -> int:
    """Copy what two ranges of a weight have in common; how many elements that is."""
    begin = max(source.offset, piece.offset)
    numel = min(source.offset + source.numel, piece.offset + piece.numel) - begin
    if numel <= 0:
        return 0
    state = optimizer.state[piece.owner]
    for name, values in source.states.items():
        if values.numel() != source.numel:  # a row or a column of Adafactor, which has whole weights
            state[name] = values.to(piece.owner.device, copy=True)
            continue
        if name != MASTER and name not in state:
            state[name] = torch.zeros_like(piece.owner)
        target = piece.owner if name == MASTER else state[name]
        begin_here = piece.start + begin - piece.offset
        target.view(-1)[begin_here : begin_here + numel].copy_(values[begin - source.offset :][:numel])
    if len(source.states) > 1:
        _set_step(state, source.step, piece, optimizer)
    return numel


def _set_step(state: dict[str, Any], step: float | None, piece: Slice, optimizer: torch.optim.Optimizer) -> None:
    """Set the number of updates as the optimizer counts them: DeepSpeed's in an integer, torch's in a tensor."""
    if type(optimizer).__module__.startswith("deepspeed."):
        state["step"] = int(step or 0)  # its Lion counts for nothing
    elif step is not None:
        device = piece.owner.device if optimizer.defaults.get("fused") else "cpu"
        state["step"] = torch.tensor(step, dtype=torch.float32, device=device)

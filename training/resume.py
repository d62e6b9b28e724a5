"""Continuing a run from a checkpoint, with the same next sample and, on the same topology, the same bits.

`resume: auto` takes the newest whole checkpoint in `save_path`; damaged and unfinished ones are named, set aside and
passed over. What the step alone does not say (model, optimizer, schedule, loss scale, random states) comes back from
the files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from models.checkpoint.layout import resolve
from training.checkpoint_engine import CheckpointFiles
from training.checkpoint_folder import CheckpointRecord, DataOrder, Topology, fault, set_aside, step_folders
from training.config import TrainConfig
from training.distributed import agreed, gather
from training.errors import ConfigError
from training.saving import random_file, restore_random_states
from training.trainer import Trainer

AUTO, NONE = "auto", "none"


def find_checkpoint(config: TrainConfig, save_path: Path, log: Console) -> Path | None:
    """The checkpoint to continue from, found whole; None to start from the beginning. All ranks call it together.

    Raises:
        ConfigError: the folder that `resume` names is no whole checkpoint.
    """
    if config.resume == AUTO:
        return _newest(save_path, log)
    folder = None
    if config.resume != NONE:
        with agreed():
            folder = resolve(config.resume)
        if reason := _fault_together(folder):
            raise ConfigError(f"resume: {folder}: {reason}; expected a whole checkpoint of a run")
    present = step_folders(save_path)
    if present and (folder is None or present[0].resolve() != folder.resolve()):
        raise ConfigError(
            f"save_path: {save_path} holds {present[0].name} of another run or a later step; expected another folder, "
            "or resume: auto"
        )
    return folder


def _newest(save_path: Path, log: Console) -> Path | None:
    """The newest whole checkpoint; those that are passed over are named, and damaged ones set aside."""
    for folder in step_folders(save_path):
        reason = _fault_together(folder)
        if reason is None:
            return folder
        log.print(f"warning: {folder.name} is passed over: {reason}")
        if torch.distributed.get_rank() == 0:
            set_aside(folder)
        torch.distributed.barrier()
    return None


def restore(trainer: Trainer, folder: Path) -> int:
    """Load a checkpoint into a fresh engine; the step after which it was saved.

    Raises:
        CheckpointError: a file cannot be read.
    """
    engine = trainer.engine
    engine.checkpoint_engine = CheckpointFiles()
    engine.load_checkpoint(str(folder.parent), tag=folder.name)
    rank = torch.distributed.get_rank()
    restore_random_states(engine.checkpoint_engine.load(str(folder / random_file(rank))))
    return int(engine.global_steps)


def check_resumable(folder: Path, data: DataOrder, topology: Topology) -> None:
    """See that a step means the same samples as when the checkpoint was written, and that its files fit the processes.

    Raises:
        ConfigError: the records, what orders them, or the division of the model changed.
    """
    record = CheckpointRecord.read(folder)
    assert record is not None, "found whole before"
    if record.data.fingerprint != data.fingerprint:
        raise ConfigError(
            f"data_path: not the samples that {folder} was trained on ({record.data.samples} then, {data.samples} "
            "now); expected the same records, tokenizer and max_seq_len, or another save_path"
        )
    for key in ("seed", "train_batch_size", "dataloader_drop_last"):
        then, now = getattr(record.data, key), getattr(data, key)
        if then != now:
            raise ConfigError(
                f"{key}: {now}, but {folder} was trained with {then}; expected {then}, or another save_path"
            )
    if record.topology != topology:
        raise ConfigError(
            f"model_topo: the run has the model {topology.told}, {topology.replicas} times, but {folder} was saved "
            f"{record.topology.told}, {record.topology.replicas} times; expected the same dims, parts and ZeRO stage"
        )


def _fault_together(folder: Path) -> str | None:
    """Each rank checks its share of a checkpoint's files."""
    mine = fault(folder, torch.distributed.get_rank(), torch.distributed.get_world_size())
    return next((reason for reason in gather(mine) if reason), None)

"""Continuing a run from a checkpoint, with the same next sample and, on the same topology, the same bits.

On another topology the weights and the optimizer's state are the same bits too (`training.checkpoint.resharding`), but
sums over stages and replicas are rounded in another order, and dropout draws other numbers.

`resume: auto` takes the newest whole checkpoint in `save_path`; damaged and unfinished ones are named, set aside and
passed over. What the step alone does not say (model, optimizer, schedule, loss scale, random states) comes back from
the files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from models.checkpoint.layout import resolve
from models.checkpoint.publish import writing
from models.spec import ModelSpec
from training.checkpoint.deepspeed_files import CheckpointFiles
from training.checkpoint.folder import CheckpointRecord, DataOrder, fault, set_aside, step_folders
from training.checkpoint.resharding import take_over
from training.checkpoint.saving import random_file, restore_random_states
from training.config.keys import TrainConfig
from training.distributed.processes import agreed, gather
from training.engine.trainer import Trainer
from training.errors import ConfigError
from training.topology import Topology

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
    with agreed():
        folders = step_folders(save_path)
    for folder in folders:
        reason = _fault_together(folder)
        if reason is None:
            return folder
        log.print(f"warning: {folder.name} is passed over: {reason}")
        with agreed(), writing(save_path):
            if torch.distributed.get_rank() == 0:
                set_aside(folder)
    return None


def resume(
    folder: Path,
    topology: Topology,
    config: TrainConfig,
    kind: type[Trainer],
    spec: ModelSpec,
    model_folder: Path,
    total_steps: int,
    log: Console,
) -> tuple[Trainer, int]:
    """Build the trainer that goes on from a checkpoint; with it, the step after which that was saved.

    Args:
        topology: of the run, which may be another than the checkpoint's.
        kind: how the model is spread now.
        model_folder: the folder that the run started from.
        total_steps: of the whole run.

    Raises:
        RunRefused: on every rank, when some rank's files are unusable.
    """
    record = CheckpointRecord.read(folder)
    assert record is not None, "found whole before"
    changed = record.topology != topology
    if not changed and not _beyond_deepspeed(topology, config):
        trainer = kind.build(config, spec, model_folder, total_steps)
        return trainer, restore(trainer, folder)
    if changed:
        log.print(
            f"{folder.name} was saved {record.topology.told_in_full}; dividing its weights and optimizer states anew: "
            f"{topology.told_in_full}; dropout, if any, draws other numbers"
        )
    trainer = kind.build(config.model_copy(update={"from_scratch": False}), spec, folder, total_steps)
    with agreed():
        take_over(trainer.engine, folder, record, spec)
    rank = torch.distributed.get_rank()
    if changed:
        torch.manual_seed(config.seed + rank + record.step * 2**20)  # no rank draws what it drew at the run's start
    else:
        restore_random_states(CheckpointFiles().load(str(folder / random_file(rank))))
    return trainer, record.step


def _beyond_deepspeed(topology: Topology, config: TrainConfig) -> bool:
    """Whether DeepSpeed 0.19.8 cannot read what it wrote: a pipeline in bf16 without ZeRO."""
    return bool(topology.parts) and topology.zero_stage == 0 and config.bf16.enabled


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


def fixed_settings(config: TrainConfig) -> dict[str, bool | str]:
    """What decides which states the optimizer keeps, by key; a run cannot go on with others."""
    return {
        "optimizer.type": config.optimizer.type,
        "bf16.enabled": config.bf16.enabled,
        "fp16.enabled": config.fp16.enabled,
    }


def check_resumable(folder: Path, data: DataOrder, settings: dict[str, bool | str]) -> None:
    """See that a step means the same samples as when the checkpoint was written, and the same kind of update.

    Raises:
        ConfigError: the records, what orders them, the optimizer or the precision changed.
    """
    record = CheckpointRecord.read(folder)
    assert record is not None, "found whole before"
    if record.data.fingerprint != data.fingerprint:
        before, samples = record.data.samples, data.samples
        counts = f" ({before} then, {samples} now)" if before != samples else ""
        raise ConfigError(
            f"data_path: not the samples that {folder} was trained on{counts}; expected the same records, tokenizer "
            "and max_seq_len, or another save_path"
        )
    order = {
        key: getattr(record.data, key) for key in ("seed", "train_batch_size", "dataloader_drop_last", "stream_gb")
    }
    for key, then in (order | record.settings).items():
        now = settings[key] if key in settings else getattr(data, key)
        if then != now:
            raise ConfigError(
                f"{key}: {now}, but {folder} was trained with {then}; expected {then}, or another save_path"
            )


def _fault_together(folder: Path) -> str | None:
    """Each rank checks its share of a checkpoint's files."""
    mine = None
    with agreed():
        mine = fault(folder, torch.distributed.get_rank(), torch.distributed.get_world_size())
    return next((reason for reason in gather(mine) if reason), None)

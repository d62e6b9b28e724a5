"""Continuing a run from a checkpoint, with the same next sample and, on the same topology, the same bits.

On another topology the weights and the optimizer's state are the same bits too (`training.checkpoint.resharding`), but
sums over stages and replicas are rounded in another order, and dropout draws other numbers. Model, optimizer states,
loss scale and random states come back from the files, all else from the config: `training.config.changes` has what of
it may be another than before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console

from models.checkpoint.layout import RECORD, resolve
from models.checkpoint.publish import NEW, writing
from models.spec import ModelSpec
from training.checkpoint.deepspeed_files import read_mapped
from training.checkpoint.folder import CheckpointRecord, DataOrder, fault, set_aside, step_folders
from training.checkpoint.resharding import take_over
from training.checkpoint.saving import random_file
from training.config.changes import compare, differs, settings_of
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.engine.trainer import Trainer
from training.errors import ConfigError, RunRefused
from training.topology import Topology

# Of config.json, what the computation does not depend on.
UNUSED = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}


def find_checkpoint(config: TrainConfig, save_path: Path, disk: Disk, log: Console) -> Path | None:
    """The checkpoint to continue from, found whole; None to start from the beginning. All ranks call it together.

    Raises:
        ConfigError: the folder that `resume` names is no whole checkpoint, or `save_path` holds others.
        RunRefused: hosts with disks of their own hold other checkpoints than each other.
    """
    if config.resume == "auto":
        return _newest(save_path, disk, log)
    folder = None
    if config.resume != "none":
        with agreed():
            folder = resolve(config.resume)
        if reason := _fault_together(folder, disk):
            raise ConfigError(f"resume: {folder}: {reason}; expected a whole checkpoint of a run")
    with agreed():
        present = step_folders(save_path)
        if present and (folder is None or present[0].resolve() != folder.resolve()):
            raise ConfigError(
                f"save_path: {save_path} holds {present[0].name} of another run or a later step; expected another "
                "folder, or resume: auto"
            )
    return folder


def _newest(save_path: Path, disk: Disk, log: Console) -> Path | None:
    """The newest checkpoint that is whole on every disk; those that are passed over are named, and set aside.

    Of each disk one rank's list counts, as a shared one may show each host another. A disk that has never seen a
    checkpoint beside one that has is not the run's: no weights of a run of days may be lost to a new one by that.
    """
    folders: list[Path] = []
    begun = False
    with agreed():
        if disk.keeps:
            folders = step_folders(save_path)
            begun = any(save_path.glob(f".step-*.partial-*/{NEW}/{RECORD}"))  # it died before it could rename
    told = [each for each in gather((disk.host, disk.keeps, folders, begun)) if each[1]]
    known = sorted({int(folder.name[5:]): folder for _, _, its, _ in told for folder in its}.items(), reverse=True)
    for host in (host for host, _, its, begun in told if known and not its and not begun):
        other = next(other for other, _, its, _ in told if its)
        raise RunRefused(
            f"save_path: {save_path} holds no checkpoint on host {host}, but {known[0][1].name} on host {other}; "
            "expected the hosts that wrote them, each with its disk, or another save_path"
        )
    for _, folder in known:
        reason = _fault_together(folder, disk)
        if reason is None:
            return folder
        log.print(f"warning: {folder.name} is passed over: {reason}")
        with agreed(), writing(save_path):
            if disk.keeps and folder.exists():
                set_aside(folder)
    return None


def resume(
    folder: Path | None,
    record: CheckpointRecord | None,
    topology: Topology,
    config: TrainConfig,
    build: Callable[[], Trainer],
    log: Console,
    tied_names: tuple[str, str] | None = None,
) -> Trainer:
    """The trainer of a run, which goes on from a checkpoint if there is one.

    Args:
        folder, record: of the checkpoint.
        topology: of the run, which may be another than the checkpoint's.
        build: gives a trainer with the checkpoint's weights, or with those that the run begins with.
        tied_names: of a tied model, its weight in the first layer and in the last.

    Raises:
        RunRefused: on every rank, when some rank's files are unusable.
    """
    if folder is None or record is None:
        return build()
    changed = record.topology != topology
    if changed:
        log.print(
            f"{folder.name} was saved {record.topology.full_description}; dividing its weights and optimizer states "
            f"anew: {topology.full_description}; dropout, if any, draws other numbers"
        )
    trainer, rank = build(), torch.distributed.get_rank()
    with agreed():
        take_over(trainer.engine, folder, record, tied_names)
        if changed:
            torch.manual_seed(config.seed + rank + record.step * 2**20)  # no rank draws what it drew at the run's start
        else:
            states = read_mapped(folder / random_file(rank))
            torch.set_rng_state(states["cpu"])
            if "device" in states:  # not of an early version
                get_accelerator().set_rng_state(states["device"])
    log.print(f"resumed: {folder}, after step {record.step}")
    return trainer


def check_resumable(folder: Path, record: CheckpointRecord, data: DataOrder, config: TrainConfig) -> list[str]:
    """What changed since a checkpoint was saved, in lines.

    Raises:
        ConfigError: a step means other samples, or another kind of update (`training.config.changes`).
    """
    before = record.data
    if before.fingerprint != data.fingerprint:
        counts = f" ({before.samples} then, {data.samples} now)" if before.samples != data.samples else ""
        raise ConfigError(
            f"data_path: not the samples that {folder} was trained on{counts}; expected the same records, tokenizer "
            "and max_seq_len, or another save_path"
        )
    if before.packed_epoch != data.packed_epoch:
        if before.packed_epoch and data.packed_epoch:
            raise differs("pack_len", data.packed_epoch, before.packed_epoch, folder)
        raise differs("packing", config.packing, "dataset" if before.packed_epoch else "batch or false", folder)
    then, now = record.settings, settings_of(config)
    if "seed" in then:
        return compare(then, now, folder)
    then = before.model_dump(include={"seed", "train_batch_size", "dataloader_drop_last", "stream_gb"}) | then
    told = f"{folder.name}: an earlier version saved it and noted only {', '.join(then)}; nothing else was compared"
    return [told, *compare(then, {key: now.get(key) for key in then}, folder)]


def check_same_model(spec: ModelSpec, folder: Path) -> None:
    """Raise a ConfigError where a model's config.json is not the one that a checkpoint was trained with."""
    then, now = ModelSpec.from_folder(folder).raw, spec.raw
    for key in sorted((then.keys() | now.keys()) - UNUSED):
        if then.get(key) != now.get(key):
            raise differs(f"model_path: config.json: {key}", now.get(key), then.get(key), folder)


def _fault_together(folder: Path, disk: Disk) -> str | None:
    """Each rank checks its share of a checkpoint's files on its disk.

    Raises:
        RunRefused: two disks hold a whole one of the same step, but not the same.
    """
    mine, which = None, None
    with agreed():
        mine = fault(folder, disk.number, len(disk.ranks))
        record = CheckpointRecord.read(folder)
        which = record and record.checksum("host")
    told = gather((disk.host, mine and disk.told(mine), which))
    for host, _, other in told:
        if other != told[0][2] and not any(reason for _, reason, _ in told):
            raise RunRefused(
                f"{folder}: on host {host} that of another run than on host {told[0][0]}; expected the same on all, or "
                "none: move one of them away"
            )
    return next((reason for _, reason, _ in told if reason), None)

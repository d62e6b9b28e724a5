"""Resume a run from a checkpoint with the same next sample and, on the same topology, the same bits.

On another topology the weights and the optimizer's state are the same bits too (`training.checkpoint.resharding`), but
sums over stages and replicas are rounded in another order, and dropout draws other numbers. Weights, optimizer states,
loss scale and random states come from the files, all else from the config; `training.config.changes` says which keys
may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from filecmp import cmp
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from torch import Tensor

from data.paths import tokenizer_files
from models.checkpoint.layout import flat
from models.errors import CheckpointError
from models.spec import ModelSpec
from training.checkpoint.deepspeed_files import read_mapped
from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.checkpoint.resharding import load_optimizer_state
from training.checkpoint.saving import random_file
from training.config.changes import compare, differs, rule_of, settings_of
from training.config.keys import TrainConfig
from training.distributed.processes import agreed
from training.engine.trainer import Trainer
from training.errors import ConfigError
from training.topology import Topology

AXES = "model_topo.process_topology.axes"  # decide each rank's position in the grid


def resume(
    folder: Path | None,
    record: CheckpointRecord | None,
    topology: Topology,
    config: TrainConfig,
    build: Callable[[], Trainer],
    log: Console,
    spec: ModelSpec | None = None,
) -> Trainer:
    """Build the trainer of a run, and restore its state from a checkpoint, if there is one.

    Args:
        folder, record: of the checkpoint.
        topology: of the run; may differ from the checkpoint's.
        build: makes a trainer with the checkpoint's weights, or the initial ones.
        spec: of a language model.
    """
    if folder is None or record is None:
        return build()
    changed = not same_positions(record, topology, config)
    if record.topology != topology:
        log.print(
            f"{folder.name} was saved {record.topology.full_description}; dividing its weights and optimizer states "
            f"anew: {topology.full_description}; dropout, if any, draws other numbers"
        )

    # Ranks that share layers or sequences draw the same numbers.
    trainer, rank = build(), config.model_topo.first_peer(torch.distributed.get_rank())
    with agreed(), _checkpoint_errors(folder):
        load_optimizer_state(trainer.engine, folder, record, spec)
        seed = config.seed + rank + record.step * 2**20  # no rank draws what it drew at the run's start
        if changed:
            torch.manual_seed(seed)
        else:
            known = restore_random_states(read_mapped(folder / random_file(rank)), seed)
    if not changed and not known:
        log.print(f"{folder.name} was saved on devices of another kind; dropout, if any, draws other numbers")
    log.print(f"resumed: {folder}, after step {record.step}")
    return trainer


@contextmanager
def _checkpoint_errors(folder: Path) -> Iterator[None]:
    """Turn torch's errors about files that do not fit each other into CheckpointErrors."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: its files do not fit each other: {' '.join(str(error).split())}; expected them as they were "
            "saved; move the folder away to go on from the checkpoint before it"
        ) from error


def same_positions(record: CheckpointRecord, topology: Topology, config: TrainConfig) -> bool:
    """Return whether each rank has the same position as before, so that it can restore its own random states."""
    now = settings_of(config)[AXES]
    return record.topology == topology and record.settings.get(AXES, now) == now


def restore_random_states(states: Mapping[str, Tensor], seed: int) -> bool:
    """Restore random states; return False, and seed the device, if they are of another kind of device."""
    torch.set_rng_state(states["cpu"])
    known = len(states["device"]) == len(get_accelerator().get_rng_state())
    if known:
        get_accelerator().set_rng_state(states["device"])
    else:
        get_accelerator().manual_seed(seed)
    return known


def check_resumable(
    folder: Path,
    record: CheckpointRecord,
    data: DataOrder,
    config: TrainConfig,
    check: Callable[[Path], object] = lambda _: None,
) -> list[str]:
    """Describe, in lines, what changed since a checkpoint was saved.

    Args:
        check: compares the models, once the settings agree that may be what made them differ.

    Raises:
        ConfigError: the same step would have other samples, or another kind of update (`training.config.changes`).
    """
    before, lines = record.data, []
    then, now = record.settings, settings_of(config)
    if "seed" not in then:
        then = before.model_dump(include={"seed", "train_batch_size", "dataloader_drop_last", "stream_gb"}) | then
        now = {key: now.get(key) for key in then}
        noted = f"an earlier version saved it and noted only {', '.join(then)}; nothing else was compared"
        lines.append(f"{folder.name}: {noted}")
    lines += compare(then, now, folder, config.rules)
    check(folder)

    if before.fingerprint != data.fingerprint:
        if "mask" in then:  # earlier versions did not note these
            rules = {key: rule_of(key, config.rules) for key in then.keys() | now.keys()}
            keys = [key for key, rule in rules.items() if not (rule.free or rule.counts)]
            # The same files may lie elsewhere now, so the paths explain nothing.
            for key in sorted(key for key in keys if key not in ("model_path", "data_path")):
                if then.get(key) != now.get(key):
                    raise differs(key, now.get(key), then.get(key), folder)
        model = Path(config.model_path)
        for file in (path.relative_to(model).as_posix() for path in tokenizer_files(model)):
            saved = folder / flat(file)
            if file != "config.json" and saved.is_file() and not cmp(saved, model / file, shallow=False):
                what = f"not the file that {folder} was trained with; expected {saved}, or another save_path"
                raise ConfigError(f"model_path: {file}: {what}")
        counts = f" ({before.samples} then, {data.samples} now)" if before.samples != data.samples else ""
        raise ConfigError(
            f"data_path: not the samples that {folder} was trained on{counts}; expected the same records, tokenizer, "
            "chat template, max_seq_len and, where the template writes it, date, or another save_path"
        )

    if before.packed_epoch != data.packed_epoch:
        if before.packed_epoch and data.packed_epoch:
            raise differs("pack_len", data.packed_epoch, before.packed_epoch, folder)
        raise differs("packing", config.packing, "dataset" if before.packed_epoch else "batch or false", folder)
    return lines

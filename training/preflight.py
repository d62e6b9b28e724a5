"""Check before a run is built that all hosts have the same inputs, and that the run's folder is usable.

Ranks with different configs, records or weights do not fail: they train something else, or deadlock. So all ranks
compare theirs with rank 0's, and the first difference is reported with host and both values, by a RunRefused on every
rank. Model files on disks of their own are compared by all their bytes.

Cost: some 50 ms per start; where the hosts have disks of their own, a pass over the model's files the first time.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from common.digests import Digests, file_digest, stamp
from common.whole_files import checksum
from models.errors import CheckpointError, reading
from training.config.keys import TrainConfig
from training.config.section import leaves
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.errors import ConfigError, RunRefused
from training.metrics.run_info import CODE, CONFIG_FILE, RUN_FILE, versions

SOURCE = ("common", "data", "models", "training", "options")
WEIGHTS = (".safetensors", ".bin", ".pt")
CONFIG = (".json", ".jinja", ".model", ".txt", ".tiktoken")
PATIENCE = 10.0  # seconds until a file of one host must appear on the others
SKEW = 10.0  # seconds that clocks may differ


def check_setup(config: TrainConfig, log: Console) -> None:
    """Check that every host has the same code, packages and config; warn about clock skew."""
    code = {f"code in {folder}/": checksum((CODE / folder).rglob("*.py")) for folder in SOURCE}
    script = {f"code of {Path(sys.argv[0]).name}": checksum([Path(sys.argv[0])])}
    packages = {f"version of {name}": version for name, version in versions().items()}
    expect_same(code | script | packages | {key: str(value) for key, value in leaves(config.dump())})
    gather(None)  # lets all ranks read their clocks at the same moment
    (_, first), *others = gather((socket.gethostname(), time.time()))
    for host, ahead in {host: now - first for host, now in others if abs(now - first) > SKEW}.items():
        log.print(f"warning: the clock of host {host} is {ahead:+.0f} s from rank 0's; so are times in logs and files")


def check_model(folder: Path, weights: bool, notes: Path, key: str = "model_path") -> None:
    """Check that every host has the same config and tokenizer files and, with `weights`, the same weight files.

    Args:
        notes: a folder that remembers digests of files.
    """
    suffixes = CONFIG + WEIGHTS if weights else CONFIG
    with agreed(), reading(folder):
        files = sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())
        paths = [path for path in files if not path.name.startswith(".")]
        seen = [(path.name, path.stat().st_ino, *stamp(path)) for path in paths]
    if all(others == seen for others in gather(seen)):  # one disk that all hosts share, or one host
        return

    found, digests = {}, Digests(notes)
    with agreed():
        for path in paths:
            try:
                digest = digests.known([path]) or digests.take([path], partial(file_digest, path))
                found[f"{key}: {path.name}"] = f"{path.stat().st_size:,} bytes with checksum {digest[:16]}"
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    expect_same(found)


def check_samples(trained: str, evaluated: str) -> None:
    """Check that every host has the same samples, by their fingerprints."""
    expect_same({"samples of data_path": trained, "samples of eval_data_path": evaluated})


def check_writable(key: str, folder: Path) -> None:
    """Check that the folder of a key can be created and written; leave nothing behind."""
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(f"{key}: {folder}: a link to {folder.readlink()}, which is not there; expected a folder")
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        with TemporaryDirectory(prefix=".probe-", dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: {folder}: cannot be written: {error.strerror}; expected a folder") from None


def check_folder(folder: Path, disk: Disk, log: Console) -> None:
    """Create the run's folder, and check that exactly the ranks of one disk see each other's files in it."""
    token = f".shared-{gather(secrets.token_hex(8))[0]}"  # a new name, whose absence no host has cached
    path = folder / f"{token}-{disk.ranks[0]}"
    try:
        with agreed():
            try:
                if (folder / CONFIG_FILE).exists() and not (folder / RUN_FILE).exists():
                    raise ConfigError(
                        f"save_path: {folder / CONFIG_FILE}: not written by a run, which would replace it; expected a "
                        "folder of the run's own"
                    )
                folder.mkdir(parents=True, exist_ok=True)
                if disk.owns_folder:
                    path.touch()
            except OSError as error:
                raise ConfigError(
                    f"save_path: {folder}: cannot be written: {error.strerror}; expected a folder"
                ) from None
        with agreed():
            deadline = time.monotonic() + PATIENCE
            while not path.exists():
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"save_path: {folder}: not what rank {disk.ranks[0]} writes to; expected a folder that all "
                        "hosts share, or storage: local"
                    )
                time.sleep(0.1)
            if len(list(folder.glob(f"{token}-*"))) > 1:
                raise ConfigError(
                    f"save_path: {folder}: hosts share it; expected a disk of its own on each, or storage: shared"
                )
    finally:
        if disk.owns_folder:
            with suppress(OSError):
                path.unlink()
    if disk.host:
        log.print(
            f"storage: local: each host has its own checkpoints in {folder}; metrics.jsonl, config.yml and tensorboard "
            f"lie on host {disk.host} alone"
        )


def expect_same(mine: Mapping[str, str]) -> None:
    """Check that all ranks have the same named values; all ranks call it together."""
    (first, expected), *others = gather((socket.gethostname(), dict(mine)))
    for host, found in others:
        for name in [*expected, *(found.keys() - expected.keys())]:
            theirs, ours = found.get(name, "none"), expected.get(name, "none")
            if theirs != ours:
                raise RunRefused(f"{name}: {theirs} on host {host}, but {ours} on host {first}; expected the same")

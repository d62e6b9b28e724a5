"""Before a run is built: what has to be the same on every host is the same, and the run's folder lies where it should.

Ranks that read other configs, records or weights do not fail: they train something else, or wait for each other in
different places. So each rank says what it has, and the first thing that differs from rank 0's is named, with host and
both values. Of a file of a model its size and some of its blocks count, which tells any two trainings apart.

Cost: some 50 ms a start, and 256 KiB read of each file of the model.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from models.errors import reading
from training.config.changes import leaves
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.errors import ConfigError, RunRefused
from training.metrics.run_info import CODE, CONFIG_FILE, RUN_FILE, versions

WINGS = ("common", "data", "models", "training")
CONFIG, WEIGHTS = (".json", ".jinja", ".model", ".txt", ".tiktoken"), (".safetensors", ".bin", ".pt")
BLOCKS, BLOCK = 16, 2**14  # of a file: how many are read, and bytes of each
PATIENCE = 10.0  # seconds within which a file of one host has to appear on the others
SKEW = 10.0  # seconds by which clocks may differ


def check_setup(config: TrainConfig, log: Console) -> None:
    """See that every host has the same code, packages and config. Clocks that differ are told.

    Raises:
        RunRefused: on every rank, where something differs.
    """
    code = {f"code in {wing}/": summed((CODE / wing).rglob("*.py")) for wing in WINGS}
    door = {f"code of {Path(sys.argv[0]).name}": summed([Path(sys.argv[0])])}
    packages = {f"version of {name}": version for name, version in versions().items()}
    expect_same(code | door | packages | {key: str(value) for key, value in leaves(config.dump())})
    gather(None)  # behind it all ranks read their clocks at the same moment
    (_, first), *others = gather((socket.gethostname(), time.time()))
    for host, ahead in {host: now - first for host, now in others if abs(now - first) > SKEW}.items():
        log.print(f"warning: the clock of host {host} is {ahead:+.0f} s from rank 0's; so are times in logs and files")


def check_model(folder: Path, weights: bool) -> None:
    """See that every host has the same files of a model: config and tokenizer, and its `weights` where they are read.

    Raises:
        RunRefused: on every rank, where a file differs or cannot be read.
    """
    suffixes = CONFIG + WEIGHTS if weights else CONFIG
    found = {}
    with agreed(), reading(folder):
        for path in sorted(folder.iterdir()):
            if path.suffix in suffixes and path.is_file() and not path.name.startswith("."):
                found[f"model_path: {path.name}"] = f"{path.stat().st_size:,} bytes with checksum {summed([path])}"
    expect_same(found)


def check_samples(trained: str, evaluated: str) -> None:
    """See that every host has the same samples, by their fingerprints.

    Raises:
        RunRefused: on every rank, where they differ.
    """
    expect_same({"samples of data_path": trained, "samples of eval_data_path": evaluated})


def check_writable(key: str, folder: Path) -> None:
    """See that a folder can be made and written, before work is put into what is for it. Nothing of it is left.

    Raises:
        ConfigError: it cannot, under the name of what says which folder.
    """
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(f"{key}: {folder}: a link to {folder.readlink()}, which is not there; expected a folder")
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        with TemporaryDirectory(prefix=".probe-", dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: {folder}: cannot be written: {error.strerror}; expected a folder") from None


def check_folder(folder: Path, disk: Disk, log: Console) -> None:
    """Make the run's folder, and see that those write to it who share a disk, and nobody else.

    Raises:
        RunRefused: on every rank, where one does not see what another one writes, or sees what it should not.
    """
    token = f".shared-{gather(secrets.token_hex(8))[0]}"  # a name that no host has looked for before
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
                if disk.keeps:
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
        if disk.keeps:
            with suppress(OSError):
                path.unlink()
    if disk.host:
        log.print(
            f"storage: local: each host has its own checkpoints in {folder}; metrics.jsonl, config.yml and tensorboard "
            f"lie on host {disk.host} alone"
        )


def expect_same(mine: Mapping[str, str]) -> None:
    """See that all ranks have the same values by the same names; all ranks call it together.

    Raises:
        RunRefused: on every rank, with the first name whose value differs from rank 0's.
    """
    (first, expected), *others = gather((socket.gethostname(), dict(mine)))
    for host, found in others:
        for name in [*expected, *(found.keys() - expected.keys())]:
            theirs, ours = found.get(name, "none"), expected.get(name, "none")
            if theirs != ours:
                raise RunRefused(f"{name}: {theirs} on host {host}, but {ours} on host {first}; expected the same")


def summed(paths: Iterable[Path]) -> str:
    """The CRC-32 of evenly spread blocks of files, their ends among them."""
    checksum = 0
    for path in sorted(paths):
        with open(path, "rb", buffering=0) as file:
            last = max(0, os.fstat(file.fileno()).st_size - BLOCK)
            for place in sorted({last * number // (BLOCKS - 1) for number in range(BLOCKS)}):
                file.seek(place)
                checksum = zlib.crc32(file.read(BLOCK), checksum)
    return f"{checksum:08x}"

"""Gather a checkpoint of a run with `storage: local` from its hosts: `convert_model.py gather`.

Each host's record lists which host has which file. Files are copied over ssh one by one, which costs a login each, and
verified. The result is an ordinary checkpoint, which appears when it is complete.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from common.terminal import reason_of
from data.paths import read_small
from models.checkpoint.layout import RECORD
from models.checkpoint.publish import publish_folder
from models.checkpoint.tensor_io import byte_bar
from models.errors import CheckpointError
from options.cluster.hosts import KEEPALIVE, SSH
from training.checkpoint.folder import CheckpointRecord, FileRecord, file_record

HOST = re.compile(r"(?!-)[\w.@:%\[\]-]+", re.ASCII)  # a host for ssh, without a character that a shell interprets


def gather_checkpoint(folder: Path, hosts: Sequence[str], target: Path, overwrite: bool = False) -> None:
    """Copy a checkpoint's files from all hosts to one folder.

    Args:
        folder: of the checkpoint, on each host.
        hosts: of the run, by their ssh names.
        target: folder to write.
        overwrite: see `publish_folder`.
    """
    folder = Path(os.path.abspath(folder))
    records = {host: read_record(host, folder) for host in dict.fromkeys(hosts)}
    (first, record), *others = records.items()
    for host, other in others:
        if other.checksum("host") != record.checksum("host"):
            raise CheckpointError(f"{folder}: on host {host} that of another run than on host {first}")

    sources = sources_of(record, {each.host: host for host, each in records.items()})
    size = sum(expected.size for _, expected in sources.values())
    with publish_folder(target, overwrite) as new, byte_bar("gather", size) as bar:
        for name, (host, expected) in sources.items():
            with open(new / name, "wb") as file:
                fetch(host, folder / name, file)
            if (found := file_record(new / name)) != expected:
                raise CheckpointError(
                    f"host {host}: {folder / name}: damaged: {found.size} bytes with checksum {found.crc32:08x}; "
                    f"expected {expected.size} with {expected.crc32:08x}, as they were written"
                )
            bar.update(found.size)

        known = record.model_dump(exclude={"hosts", "host", "crc32"}, exclude_unset=True)
        files = {name: file.model_dump() for name, (_, file) in sources.items()}
        CheckpointRecord.model_validate(known | {"files": files}).write(new)


def sources_of(record: CheckpointRecord, hosts: dict[str, str]) -> dict[str, tuple[str, FileRecord]]:
    """Choose the first host that has each file: name -> host and record.

    Args:
        hosts: name in the record -> ssh name.
    """
    sources: dict[str, tuple[str, FileRecord]] = {}
    for host, files in record.hosts.items():
        for name, file in files.items():
            if host in hosts:
                sources.setdefault(name, (hosts[host], file))
    for host, files in record.hosts.items():
        for name in files.keys() - sources:
            raise CheckpointError(f"{name}: was written on host {host}; expected it among the hosts")
    return sources


def read_record(host: str, folder: Path) -> CheckpointRecord:
    """Read a host's record of a checkpoint; raise as `gather_checkpoint`."""
    with TemporaryFile() as file:
        fetch(host, folder / RECORD, file)
        file.seek(0)
        record = CheckpointRecord.parse(file.read())
    if record is None:
        raise CheckpointError(f"host {host}: {folder / RECORD}: damaged")
    if not record.hosts:
        raise CheckpointError(f"host {host}: {folder}: whole already; expected a checkpoint of storage: local")
    return record


def fetch(host: str, path: Path, file: BinaryIO) -> None:
    """Copy a host's file; raise as `gather_checkpoint`."""
    words = [*SSH, *KEEPALIVE, "--", host, f"cat -- {shlex.quote(str(path))}"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, check=False)
    except OSError as error:
        raise CheckpointError(f"ssh: cannot be started: {error.strerror}; expected it on this machine") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1].strip() if lines else f"ssh left with code {done.returncode}"
        raise CheckpointError(f"host {host}: {reason}; expected {path} there")


def hosts_of(names: str | None, hostfile: str | None) -> list[str]:
    """Parse the hosts of `--hosts node1,node2`, or of a hostfile."""
    hosts = names.split(",") if names is not None else []
    if hostfile is not None:
        try:
            lines = read_small(hostfile).decode("utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"--hostfile: {hostfile}: cannot be read: {reason_of(error)}") from None
        hosts = [words[0] for line in lines if (words := line.partition("#")[0].split())]
    for host in hosts or [""]:
        if not HOST.fullmatch(host):
            raise CheckpointError(f"{host!r}: no name of a host; expected such as --hosts node1,node2")
    return hosts

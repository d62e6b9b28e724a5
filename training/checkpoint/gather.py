"""Gather a checkpoint of a run with `storage: local` from its hosts: `convert_model.py gather`.

Each host's record says which host has which file. Files are copied over ssh, one after the other, and verified as they
arrive. The result is an ordinary checkpoint, which appears when it is complete. Cost: a login per file.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.terminal import reason_of
from data.paths import read_small
from models.checkpoint.layout import RECORD
from models.checkpoint.publish import publish_folder
from models.checkpoint.tensor_io import byte_bar
from models.errors import CheckpointError
from training.checkpoint.folder import CheckpointRecord, FileRecord
from training.launch.hosts import LIVELY, SSH

HOST = re.compile(r"(?!-)[\w.@:%\[\]-]+", re.ASCII)  # what ssh takes for a host, and no shell for anything else
LARGEST_RECORD = 2**28  # bytes
PIECE = 2**20  # bytes


def gather(folder: Path, hosts: Sequence[str], target: Path, overwrite: bool = False) -> None:
    """Copy a checkpoint's files from all hosts to one folder.

    Args:
        folder: of the checkpoint, on each host.
        hosts: of the run, by their ssh names.
        target: folder to write.
        overwrite: see `publish_folder`.

    Raises:
        CheckpointError: a host does not answer, its files are damaged or those of another run, or one is missing.
    """
    folder = Path(os.path.abspath(folder))
    records = {host: read_record(host, folder) for host in dict.fromkeys(hosts)}
    first, *others = records.items()
    for host, record in others:
        if record.checksum("host") != first[1].checksum("host"):
            raise CheckpointError(f"{folder}: on host {host} that of another run than on host {first[0]}")
    sources = sources_of(first[1], {record.host: host for host, record in records.items()})
    size = sum(file.size for _, file in sources.values())
    with publish_folder(target, overwrite) as new, byte_bar("gather", size) as bar:
        for name, (host, expected) in sources.items():
            found = FileRecord(size=0, crc32=0)
            with open(new / name, "wb") as file:
                for piece in content(host, folder / name, expected.size):
                    file.write(piece)
                    found = FileRecord(size=found.size + len(piece), crc32=zlib.crc32(piece, found.crc32))
                    bar.update(len(piece))
            if found != expected:
                what = f"{found.size} bytes with checksum {found.crc32:08x}"
                wanted = f"{expected.size} with {expected.crc32:08x}, as they were written"
                raise CheckpointError(f"host {host}: {folder / name}: damaged: {what}; expected {wanted}")
        known = first[1].model_dump(exclude={"hosts", "host", "crc32"}, exclude_unset=True)
        files = {name: file.model_dump() for name, (_, file) in sources.items()}
        CheckpointRecord.model_validate(known | {"files": files}).write(new)


def sources_of(record: CheckpointRecord, hosts: dict[str, str]) -> dict[str, tuple[str, FileRecord]]:
    """Choose the first host that has each file: name -> host and record.

    Args:
        hosts: name in the record -> ssh name.

    Raises:
        CheckpointError: none of the hosts has a file.
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
    """Read a host's record of a checkpoint; raise as `gather`."""
    record = CheckpointRecord.parse(b"".join(content(host, folder / RECORD, LARGEST_RECORD)))
    if record is None:
        raise CheckpointError(f"host {host}: {folder / RECORD}: damaged")
    if not record.hosts:
        raise CheckpointError(f"host {host}: {folder}: whole already; expected a checkpoint of storage: local")
    return record


def content(host: str, path: Path, most: int) -> Iterator[bytes]:
    """Yield a host's file in pieces, up to one piece beyond `most` bytes; raise as `gather`."""
    words, whole = [*SSH, *LIVELY, "--", host, f"cat -- {shlex.quote(str(path))}"], False
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said)
        except OSError as error:
            raise CheckpointError(f"ssh: cannot be started: {error.strerror}; expected it on this machine") from None
        with process:
            assert process.stdout
            try:
                while most >= 0 and (piece := process.stdout.read(PIECE)):
                    most -= len(piece)
                    yield piece
                whole = most >= 0
            finally:
                if not whole:
                    process.kill()
        if process.returncode and whole:
            said.seek(0)
            why = said.read().decode(errors="replace").split("\n")
            why = [line for line in why if line.strip()] or [f"ssh left with code {process.returncode}"]
            raise CheckpointError(f"host {host}: {why[-1].strip()}; expected {path} there")


def hosts_of(listed: str | None, hostfile: str | None) -> list[str]:
    """Parse the hosts of `--hosts node1,node2`, or of a hostfile.

    Raises:
        CheckpointError: there are none, or one is not a host name.
    """
    hosts = listed.split(",") if listed is not None else []
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

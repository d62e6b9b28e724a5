"""Two hosts for the tests of a file, or a reason why there are none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, Hosts, lacking
from tests.conftest import FAQ


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two hosts, of which each has a disk of its own at /mnt."""
    if reason := lacking():
        pytest.skip(reason)
    with Hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def disks(hosts: list[Host], make_checkpoint: Callable[..., Path]) -> list[Path]:
    """The hosts' disks, with the same model and records."""
    disks = [host.folder / "disk" for host in hosts]
    for disk in disks:
        for old in disk.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        shutil.copytree(make_checkpoint("llama"), disk / "model")
        (disk / "records.json").write_text(json.dumps(json.loads(FAQ.read_text(encoding="utf-8"))[:32]))
    return disks

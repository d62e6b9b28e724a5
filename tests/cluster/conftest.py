"""Two hosts for the tests of a file, or the reason to skip them, and a run to compare with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, Hosts, lacking
from tests.conftest import write_records
from tests.launching import metrics, supervised, topology, write_config


def filled(disk: Path, model: Path) -> Path:
    """Put a model and records on a disk, and remove the rest."""
    for old in disk.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copytree(model, disk / "model")
    write_records(disk / "records.json", 32)
    return disk


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
    return [filled(host.folder / "disk", make_checkpoint("llama")) for host in hosts]


@pytest.fixture(scope="session")
def alone(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run on one host."""
    folder = tmp_path_factory.mktemp("alone")
    filled(folder, make_checkpoint("llama"))
    config = write_config(
        folder / "run.yml",
        model_path=str(folder / "model"),
        data_path=str(folder / "records.json"),
        model_topo=topology((2, 1)),
        max_steps=4,
    )
    assert supervised(2, "train_ds.py", "--config", config).returncode == 0
    return [line["loss"] for line in metrics(folder / "run")]

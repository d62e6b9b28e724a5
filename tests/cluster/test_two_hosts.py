"""The README's command on two hosts: it trains as on one, and refuses what differs between them before it trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cluster.hosts import Host, deepspeed, hostfile_of, told
from tests.launching import deepspeed as on_one_host
from tests.launching import metrics, run, topology, write_config

pytestmark = pytest.mark.launched

MODEL, RECORDS, RUN = "/mnt/model", "/mnt/records.json", "/mnt/run.yml"  # on each host's own disk


def configured(disks: list[Path], save_path: Path | str, **keys: Any) -> None:
    """The same config on each disk."""
    keys = {"model_path": MODEL, "data_path": RECORDS, "save_path": str(save_path), "max_steps": 4} | keys
    for disk in disks:
        write_config(disk / "run.yml", **{"model_topo": topology((2, 1))} | keys)


def trained(hosts: list[Host], folder: Path, *words: str, slots: int = 1) -> Any:
    """What the command comes to that starts a run from the first host."""
    hostfile = hostfile_of(hosts, slots, folder / "hostfile")
    return run(*hosts[0].enter(*deepspeed(hostfile, "train_ds.py", "--config", RUN, *words)))


@pytest.mark.slow
def test_two_hosts_train_as_one(hosts: list[Host], disks: list[Path], tmp_path: Path) -> None:
    configured(disks, tmp_path / "run", save_interval=2)
    result = trained(hosts, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    alone = write_config(
        tmp_path / "alone.yml",
        model_path=str(disks[0] / "model"),
        data_path=str(disks[0] / "records.json"),
        model_topo=topology((2, 1)),
        max_steps=4,
    )
    assert on_one_host(2, "train_ds.py", "--config", alone).returncode == 0
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert losses == pytest.approx([line["loss"] for line in metrics(tmp_path / "alone")], rel=1e-5)


DIFFERENT: dict[str, tuple[Callable[[Path], object], str]] = {}


def different(name: str, message: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    """Note a way in which a disk can differ from another one, and what is told of it."""

    def note(change: Callable[[Path], object]) -> Callable[[Path], object]:
        DIFFERENT[name] = change, message
        return change

    return note


@different("config", "optimizer.params.lr: 0.002 on host node2, but 0.001 on host node1; expected the same")
def another_config(disk: Path) -> None:
    text = (disk / "run.yml").read_text()
    (disk / "run.yml").write_text(text.replace("lr: 0.001", "lr: 0.002"))


@different("records", "samples of data_path: ")
def other_records(disk: Path) -> None:
    records = json.loads((disk / "records.json").read_text())
    (disk / "records.json").write_text(json.dumps(records[::-1]))


@different("tokenizer", "model_path: tokenizer.json: ")
def another_tokenizer(disk: Path) -> None:
    path = disk / "model/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    one, two = list(words)[100:102]
    words[one], words[two] = words[two], words[one]
    path.write_text(json.dumps(tokenizer))


@different("weights", "model_path: model.safetensors: ")
def other_weights(disk: Path) -> None:
    path = disk / "model/model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


@different("no model", "host node2: /mnt/model: not found; expected a model folder")
def no_model(disk: Path) -> None:
    shutil.rmtree(disk / "model")


@different("no records", "host node2: ")
def no_records(disk: Path) -> None:
    (disk / "records.json").unlink()


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if each == "records" else pytest.mark.longest) for each in DIFFERENT],
)
def test_what_differs_is_named_before_training(name: str, hosts: list[Host], disks: list[Path], tmp_path: Path) -> None:
    change, message = DIFFERENT[name]
    configured(disks, tmp_path / "run")
    change(disks[1])
    result = trained(hosts, tmp_path)
    assert result.returncode != 0
    (line,) = told(result)
    assert message in line and "node2" in line
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert not any(host.processes() for host in hosts)


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_refused(hosts: list[Host], disks: list[Path], tmp_path: Path) -> None:
    configured(disks, "/mnt/run")
    result = trained(hosts, tmp_path)
    assert result.returncode != 0
    (line,) = told(result)
    assert "host node2: save_path: /mnt/run: not what rank 0 writes to; expected a folder that all hosts share" in line
    assert not (disks[0] / "run/metrics.jsonl").exists()

"""The README's command on two hosts: it trains as on one, and refuses what differs between them before it trains."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.cluster.hosts import Host, deepspeed, hostfile_of, told
from tests.conftest import ROOT
from tests.launching import metrics, run, start, topology, write_config

pytestmark = pytest.mark.launched

MODEL, RECORDS, RUN = "/mnt/model", "/mnt/records.json", "/mnt/run.yml"  # on each host's own disk


def configured(disks: list[Path], save_path: Path | str, **keys: Any) -> None:
    """The same config on each disk."""
    defaults = {"model_path": MODEL, "data_path": RECORDS, "max_steps": 4, "model_topo": topology((2, 1))}
    for disk in disks:
        write_config(disk / "run.yml", save_path=str(save_path), **(defaults | keys))


def trained(hosts: list[Host], folder: Path, *words: str, slots: int = 1) -> Any:
    """What the command comes to that starts a run from the first host."""
    hostfile = hostfile_of(hosts, slots, folder / "hostfile")
    return run(*hosts[0].enter(*deepspeed(hostfile, "train_ds.py", "--config", RUN, *words)))


class Start(NamedTuple):
    """A way to start a run on two hosts: what it is spread over, how many slots each has, and words of the launcher."""

    dims: tuple[int, int] = (2, 1)
    slots: int = 1
    words: tuple[str, ...] = ()
    door: str = "train_ds.py"


STARTS = {
    "stages": Start(),
    "replicas": Start((1, 2)),
    "both": Start((2, 2), slots=2),
    "zero": Start((1, 2), door="train_ds_zero.py"),
    "included": Start(slots=2, words=("--include", "node1:1@node2:0")),
    "excluded": Start((3, 1), slots=2, words=("--exclude", "node1:1")),
    "static": Start(words=("--master_addr", "node1", "--master_port", "29400")),
    "c10d": Start(words=("--rdzv_backend", "c10d", "--rdzv_endpoint", "node1:29400", "--rdzv_id", "run")),
}
MEETING, DETECTOR = 29610, 29611


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each == "stages" else pytest.mark.longest) for each in STARTS]
)
def test_two_hosts_train_as_one(
    name: str, hosts: list[Host], disks: list[Path], alone: list[float], tmp_path: Path
) -> None:
    """Whoever starts it: also where each host's own name stands for its loopback address, as hosts.py makes them."""
    dims, slots, words, door = STARTS[name]
    run_folder, ports = tmp_path / "run", {"meeting": MEETING, "failure_detector": DETECTOR}
    configured(disks, run_folder, model_topo=topology(dims), save_interval=2, ports=ports)
    environment = tmp_path / "environment"  # which the user would have in .deepspeed_env
    environment.write_text("OF_THE_USER=a value\n")
    if name in ("static", "c10d"):
        torchrun: tuple[str | Path, ...] = (
            Path(sys.executable).parent / "torchrun",
            "--nnodes",
            "2",
            "--nproc_per_node",
            str(slots),
            *words,
        )
        numbers: list[tuple[str, ...]] = [
            ("--node_rank", str(number)) if name == "static" else () for number in range(2)
        ]
        commands = [
            host.enter(*torchrun, *number, door, "--config", RUN) for host, number in zip(hosts, numbers, strict=True)
        ]
    else:
        hostfile = hostfile_of(hosts, slots, tmp_path / "hostfile")
        command = deepspeed(hostfile, *words, door, "--config", RUN)
        commands = [hosts[0].enter("env", f"DS_ENV_FILE={environment}", *command)]
    launches = [start(*each) for each in commands]
    ranks: list[psutil.Process] = []

    def all_started() -> bool:
        """Whether every rank is there. Looked at while they start: a run of 4 steps ends soon after its first."""
        pids = [pid for host in hosts for pid, line in host.processes().items() if is_rank(line, door)]
        ranks[:] = map(psutil.Process, pids)
        return len(ranks) == prod(dims)

    def listens() -> bool:
        ports = subprocess.run(hosts[0].enter("ss", "-Hltn"), capture_output=True, text=True, check=True).stdout
        return f":{MEETING} " in ports and f":{DETECTOR} " in ports

    launches[0].until(all_started)
    if name not in ("static", "c10d"):
        assert {rank.environ().get("OF_THE_USER") for rank in ranks} == {"a value"}
    launches[0].until(listens)
    for launch in launches:
        result = launch.end()
        assert result.returncode == 0, result.stdout + result.stderr
    assert [line["loss"] for line in metrics(run_folder)] == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_two_hosts_answer_as_one_process(
    hosts: list[Host], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A stage on each host, which two processes share."""
    model = make_checkpoint("llama", initializer_range=0.3, tie_word_embeddings=False)
    source, target, alone = (tmp_path / f"{name}.jsonl" for name in ("prompts", "together", "alone"))
    source.write_text("".join(json.dumps({"prompt": "Why? " * times}) + "\n" for times in (1, 7, 2)))
    words = ("demo.py", "--model", str(model), "--prompts-file", str(source), "--greedy", "--max-new-tokens", "16")
    hostfile = hostfile_of(hosts, 2, tmp_path / "hostfile")
    result = run(*hosts[0].enter(*deepspeed(hostfile, *words, "--output", str(target), "--tensor-parallel", "2")))
    assert result.returncode == 0, result.stdout + result.stderr
    assert run(sys.executable, *words, "--output", alone).returncode == 0
    assert target.read_bytes() == alone.read_bytes()


def is_rank(command_line: str, door: str) -> bool:
    """Whether a process is one of the run's, and none of what started it."""
    python, *words = command_line.split()
    return python.endswith("python") and words[:2] == ["-u", door]


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


PACKAGES = Path(sysconfig.get_paths()["purelib"])
AN_HOUR_AHEAD = (  # and no more, although it is run for each of a folder's names
    "import time; vars(time).setdefault('right', time.time); time.time = lambda: __import__('time').right() + 3600"
)


def other_version(layer: Path) -> None:
    """Of a package: what its description says."""
    (path,) = PACKAGES.glob("lion_pytorch-*.dist-info/METADATA")
    (layer / path.parent.name).mkdir()
    text = re.sub(r"(?m)^Version: .*$", "Version: 0.0.1", path.read_text(encoding="utf-8"), count=1)
    (layer / path.parent.name / path.name).write_text(text, encoding="utf-8")


def other_code(layer: Path) -> None:
    (layer / "log.py").write_text((ROOT / "common/log.py").read_text(encoding="utf-8") + "# changed\n")


def other_clock(layer: Path) -> None:
    """By what Python runs at its start."""
    (layer / "ahead.pth").write_text(AN_HOUR_AHEAD)


# The folder of which one host has other files, these, and what is told.
INSTALLED: dict[str, tuple[Path, Callable[[Path], None], str]] = {
    "version": (PACKAGES, other_version, "error: version of lion-pytorch: 0.0.1 on host node2, but "),
    "code": (ROOT / "common", other_code, "error: code in common/: "),
    "clock": (PACKAGES, other_clock, "warning: the clock of host node2 is +3600 s from rank 0's; so are times in logs"),
}


@pytest.mark.longest
@pytest.mark.parametrize("name", INSTALLED)
def test_what_is_installed_otherwise_is_named(name: str, hosts: list[Host], disks: list[Path], tmp_path: Path) -> None:
    folder, change, message = INSTALLED[name]
    (layer := tmp_path / "layer").mkdir()
    change(layer)
    configured(disks, tmp_path / "run")
    layers = f"lowerdir={layer}:{folder}"
    assert run(*hosts[1].enter("mount", "-t", "overlay", "none", "-o", layers, folder)).returncode == 0
    try:
        result = trained(hosts, tmp_path)
    finally:
        assert run(*hosts[1].enter("umount", folder)).returncode == 0
    assert message in result.stdout + result.stderr
    trains = message.startswith("warning")
    assert (result.returncode == 0, (tmp_path / "run/metrics.jsonl").exists()) == (trains, trains)
    assert not any(host.processes() for host in hosts)


@pytest.mark.longest
def test_a_folder_that_is_not_shared_is_refused(hosts: list[Host], disks: list[Path], tmp_path: Path) -> None:
    configured(disks, "/mnt/run")
    result = trained(hosts, tmp_path)
    assert result.returncode != 0
    (line,) = told(result)
    assert "host node2: save_path: /mnt/run: not what rank 0 writes to; expected a folder that all hosts share" in line
    assert not (disks[0] / "run/metrics.jsonl").exists()

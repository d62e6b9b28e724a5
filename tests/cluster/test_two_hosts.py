"""The README's command on two hosts: it trains as on one, and refuses what differs before it trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.cases import tiered
from tests.cluster.hosts import Host, deepspeed, host_errors, hostfile_of
from tests.launching import metrics, run, start, topology, write_config

pytestmark = pytest.mark.launched

MODEL, RECORDS, RUN = "/mnt/model", "/mnt/records.json", "/mnt/run.yml"  # on each host's own disk


def configured(disks: list[Path], save_path: Path | str, **keys: Any) -> None:
    """Write the same config on each disk."""
    defaults = {"model_path": MODEL, "data_path": RECORDS, "max_steps": 4, "model_topo": topology((2, 1))}
    for disk in disks:
        write_config(disk / "run.yml", save_path=str(save_path), **(defaults | keys))


def trained(hosts: list[Host], folder: Path, *words: str, slots: int = 1) -> Any:
    """Start a run from the first host, and wait for its end."""
    hostfile = hostfile_of(hosts, slots, folder / "hostfile")
    return run(*hosts[0].enter(*deepspeed(hostfile, "train_ds.py", "--config", RUN, *words)))


class Start(NamedTuple):
    """A way to start a run on two hosts; each has `slots`, and the launcher gets `words`."""

    dims: tuple[int, int] = (2, 1)
    slots: int = 1
    words: tuple[str, ...] = ()
    script: str = "train_ds.py"


STARTS = {
    "stages": Start(),
    "replicas": Start((1, 2)),
    "both": Start((2, 2), slots=2),
    "zero": Start((1, 2), script="train_ds_zero.py"),
    "included": Start(slots=2, words=("--include", "node1:1@node2:0")),
    "excluded": Start((3, 1), slots=2, words=("--exclude", "node1:1")),
    "static": Start(words=("--master_addr", "node1", "--master_port", "29400")),
    "c10d": Start(words=("--rdzv_backend", "c10d", "--rdzv_endpoint", "node1:29400", "--rdzv_id", "run")),
}
MEETING, DETECTOR = 29610, 29611


@pytest.mark.parametrize("name", tiered(STARTS, quick=(), slow=["stages"]))
def test_two_hosts_train_as_one(
    name: str, hosts: list[Host], disks: list[Path], alone: list[float], tmp_path: Path
) -> None:
    """By each launcher, although each host's own name stands for its loopback address (hosts.py)."""
    dims, slots, words, script = STARTS[name]
    run_folder, ports = tmp_path / "run", {"meeting": MEETING, "failure_detector": DETECTOR}
    configured(disks, run_folder, model_topo=topology(dims), save_interval=2, ports=ports)
    environment = tmp_path / "environment"  # which the user would have in .deepspeed_env
    environment.write_text("OF_THE_USER=a value\n")
    if name in ("static", "c10d"):
        torchrun = [
            str(Path(sys.executable).parent / "torchrun"),
            "--nnodes",
            "2",
            "--nproc_per_node",
            str(slots),
            *words,
        ]
        numbers = [["--node_rank", str(number)] if name == "static" else [] for number in range(2)]
        commands = [
            host.enter(*torchrun, *number, script, "--config", RUN) for host, number in zip(hosts, numbers, strict=True)
        ]
    else:
        hostfile = hostfile_of(hosts, slots, tmp_path / "hostfile")
        command = deepspeed(hostfile, *words, script, "--config", RUN)
        commands = [hosts[0].enter("env", f"DS_ENV_FILE={environment}", *command)]
    launches = [start(*each) for each in commands]
    ranks: list[psutil.Process] = []

    def all_started() -> bool:
        """Return whether every rank runs. Polled while they start: a run of 4 steps ends soon after its first step."""
        pids = [pid for host in hosts for pid, line in host.processes().items() if is_rank(line, script)]
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


@pytest.mark.longest
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


def is_rank(command_line: str, script: str) -> bool:
    """Return whether a process is one of the run's, and none of what started it."""
    python, *words = command_line.split()
    return python.endswith("python") and words[:2] == ["-u", script]


def reverse_records(disk: Path) -> None:
    records = json.loads((disk / "records.json").read_text())
    (disk / "records.json").write_text(json.dumps(records[::-1]))


def remove_model(disk: Path) -> None:
    shutil.rmtree(disk / "model")


# Of what tests/training/test_preflight.py has ranks of one host refuse.
@pytest.mark.longest
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(reverse_records, "samples of data_path: ", id="records"),
        pytest.param(remove_model, "host node2: /mnt/model: not found; expected a model folder", id="no model"),
    ],
)
def test_what_differs_is_named_before_training(
    change: Callable[[Path], None], message: str, hosts: list[Host], disks: list[Path], tmp_path: Path
) -> None:
    configured(disks, tmp_path / "run")
    change(disks[1])
    result = trained(hosts, tmp_path)
    assert result.returncode != 0
    (line,) = host_errors(result)
    assert message in line and "node2" in line
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert not any(host.processes() for host in hosts)

"""The tasks of a Slurm step are ranks; other processes of a job launch their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch

from tests.conftest import ROOT
from training.distributed.processes import ProcessInfo
from training.launch.agent import free_port
from training.launch.slurm import first_host, tasks_by_host

# As srun of Slurm 22.05 sets them: two tasks on the first host, one on each of the others.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x3)",
    "SLURM_STEP_NODELIST": "node[03-05,9],other",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "5",
}
SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without a launcher's variables, restored afterwards."""
    own = {name: value for name, value in os.environ.items() if name not in SET and not name.startswith("SLURM")}
    monkeypatch.setattr(os, "environ", own)
    return own


def test_a_task_of_a_step_is_a_rank(environment: dict[str, str]) -> None:
    environment |= STEP
    rank_3 = ProcessInfo(rank=3, world_size=5, local_rank=0, local_size=1)
    assert ProcessInfo.from_environment() == rank_3
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == (
        "node03",
        str(20_000 + (16 * 4711 + 2) % 12_000),
    )
    assert ProcessInfo.from_environment() == rank_3  # after an exec


def test_variables_of_a_user_or_a_launcher_count(environment: dict[str, str]) -> None:
    environment |= STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    ProcessInfo.from_environment()
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")
    environment |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert ProcessInfo.from_environment() == ProcessInfo(rank=1, world_size=2, local_rank=1, local_size=2)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # A script of sbatch, and a shell that srun started: a job of several tasks, but a step of one at most.
        {
            name: STEP[name]
            for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")
        },
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"},
    ],
    ids=["no job", "batch script", "shell"],
)
def test_what_else_runs_in_a_job_is_no_rank(variables: dict[str, str], environment: dict[str, str]) -> None:
    environment |= variables
    assert ProcessInfo.from_environment() is None


@pytest.mark.parametrize(
    ("counts", "tasks"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2),3(x2)", [1, 1, 3, 3]), ("16(x2)", [16, 16])]
)
def test_tasks_of_each_host(counts: str, tasks: list[int]) -> None:
    assert tasks_by_host(counts) == tasks


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[01-03,7],other", "node01"),
        ("node[7,09-11]", "node7"),
        ("a-1,b[2-3]", "a-1"),
        ("rack[0-1]-node[08-15]-ib,x", "rack0-node08-ib"),
    ],
)
def test_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


MET = """
import os, sys
from datetime import timedelta
import torch
from training import errors
from training.distributed import joining, processes, rendezvous
rendezvous.PATIENCE, errors.RANK_0_SPEAKS = float(sys.argv[1]), 0
process = processes.ProcessInfo.from_environment()
with errors.exit_with_one_line(process.rank):
    joining.join(process, timedelta(minutes=30), int(sys.argv[2]))
    print(process, processes.gather(process.rank), os.environ.get("GLOO_SOCKET_IFNAME"))
"""


def tasks(which: Iterable[int], patience: float, port: int | None = None) -> list[subprocess.CompletedProcess[str]]:
    """Run some of the two tasks of a step on one host."""
    environment = {name: value for name, value in os.environ.items() if name not in SET}
    environment |= STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", MET, str(patience), str(port or free_port())]
    started = [
        subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment | {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in which
    ]
    ended = []
    for process in started:
        output = process.communicate()
        ended.append(subprocess.CompletedProcess(words, process.returncode, *output))
    return ended


@pytest.mark.slow
def test_tasks_meet() -> None:
    for number, done in enumerate(tasks(range(2), 600)):
        assert done.returncode == 0, done.stderr
        assert f"ProcessInfo(rank={number}, world_size=2, local_rank={number}, local_size=2) [0, 1] lo" in done.stdout
        assert ("ports.meeting: the ranks meet at port" in done.stdout) == (number == 0)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_a_task_that_does_not_come_is_named(alone: int) -> None:
    (done,) = tasks([alone], 2)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert ("error: rank 1 did not come to 127.0.0.1:" if alone == 0 else "cannot meet at 127.0.0.1:") in line
    assert "Traceback" not in done.stderr


def test_a_rank_of_another_run_is_refused() -> None:
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    torch.distributed.PrefixStore("pipetune-", store).set("1", "somebody else")
    (done,) = tasks([1], 600, port)
    assert done.returncode == 2
    assert "another run has a rank 1 there" in done.stderr and "Traceback" not in done.stderr

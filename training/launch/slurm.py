"""Slurm: its `srun` starts the processes of a run where no other launcher does, and its jobs can go on later.

What srun says of a task is said again by the names that other launchers use, and where the ranks meet is worked out
from what all tasks know. A step of one task stands for no process of a run: a shell in a job is one, and what is
started there begins a launcher of its own.
"""

from __future__ import annotations

import os
import re
import subprocess

PORTS = range(20_000, 32_000)  # below those that the kernel gives to whoever asks for any
REQUEUE = 60  # seconds for Slurm's controller to answer


def take_up() -> None:
    """Put into the environment what a launcher would, where this process is one of a step's several tasks."""
    environment = os.environ
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or int(tasks) < 2:
        return
    on_each_host = tasks_by_host(environment["SLURM_STEP_TASKS_PER_NODE"])
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    environment |= {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(on_each_host[int(environment["SLURM_NODEID"])]),
    }
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(PORTS[(16 * job + step) % len(PORTS)]))


def tasks_by_host(told: str) -> list[int]:
    """How many tasks each host has, of `2(x3),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", told)
    return [int(tasks) for tasks, hosts in found for _ in range(int(hosts or 1))]


def first_host(told: str) -> str:
    """The first of `node[01-03,07],other`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", told).split(",")[0]


def requeue() -> None:
    """Have the job that this process belongs to, if any, start again from its script; says so, or why it cannot."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return
    print(f"requeue: Slurm is asked to start job {job} again, which goes on from there", flush=True)
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=REQUEUE, check=False
        )
        why = (done.stderr or done.stdout).strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        told = why.splitlines()[-1]
        print(f"warning: requeue: job {job} is not started again: {told}; submit it once more", flush=True)

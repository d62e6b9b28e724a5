"""Slurm: let `srun` start the processes of a run, and requeue its job.

srun's variables are translated into those of other launchers; address and port of the rendezvous follow from what all
tasks know. A step of one task is no process of a run but, for example, a shell in a job, from which a run launches its
own processes.
"""

from __future__ import annotations

import os
import re
import subprocess

PORTS = range(20_000, 32_000)  # below those that the kernel assigns
REQUEUE = 60  # seconds for Slurm's controller to answer


def set_environment() -> None:
    """Set a launcher's variables if this process is one of a step's several tasks."""
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


def tasks_by_host(counts: str) -> list[int]:
    """Parse the number of tasks of each host, such as `2(x3),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    by_host: list[int] = []
    for tasks, hosts in found:
        by_host += [int(tasks)] * int(hosts or 1)
    return by_host


def first_host(hosts: str) -> str:
    """Return the first of `node[01-03,07],other`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", hosts).split(",")[0]


def requeue() -> None:
    """Ask Slurm to start this process's job, if any, again from its script; print that, or why it fails."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return
    print(f"requeue: Slurm is asked to start job {job} again, which goes on from there", flush=True)
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=REQUEUE, check=False
        )
        reason = (done.stderr or done.stdout).strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        last = reason.splitlines()[-1]
        print(f"warning: requeue: job {job} is not started again: {last}; submit it once more", flush=True)

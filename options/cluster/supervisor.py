"""Supervise a run on several hosts (`training.launch.supervisor`), with an agent on each, over ssh.

After a fault all hosts are inspected. The run goes on with all of them if they answer within RETURN seconds, else with
those that do, in the largest topology that fits. While none fits, it waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from options.cluster.hosts import agent_words, inspect_hosts
from training.errors import ConfigError, print_to_stderr
from training.launch.agent import Answer
from training.launch.supervisor import JOB, Shape, SupervisedRun, Supervisor, clock, rendezvous

LOST = 255  # exit code of an ssh that has lost its connection
RETURN, AGAIN = 30.0, 2.0  # seconds until a run goes on without a host, and between two inspections


@dataclass
class HostedRun(SupervisedRun):
    """What to run and where.

    Attributes:
        environment: of the ranks on every host.
        hosts: the devices of each that may be used.
        smaller: the topologies that may be used where hosts are gone.
        patience: seconds to wait for hosts without which no topology fits, too.
    """

    environment: dict[str, str]
    hosts: dict[str, list[int]]
    smaller: list[Shape]


def main() -> None:
    """Supervise the job that `options.cluster.hostfile` has put into the environment."""
    sys.exit(HostsSupervisor(HostedRun(command=sys.argv[1:], **json.loads(os.environ.pop(JOB)))).supervise())


class HostsSupervisor(Supervisor[HostedRun]):
    """Runs a job on several hosts to its end."""

    def inspect(self) -> dict[str, Answer]:
        return {host: answer for host, answer in self._ask().items() if not isinstance(answer, str)}

    def _ask(self) -> dict[str, Answer | str]:
        return inspect_hosts(list(self._job.hosts), self._run, self._job.save_path)

    def find_hosts(self, patience: float) -> tuple[dict[str, Answer], Shape]:
        job, begin, waits = self._job, time.monotonic(), False
        while True:
            found = self._ask()
            here = {host: answer for host, answer in found.items() if not isinstance(answer, str)}
            slots = sum(len(job.hosts[host]) for host in here)
            waited = time.monotonic() - begin
            if len(here) == len(found) or waited > min(RETURN, patience) > 0:
                for shape in (job.shape, *job.smaller):
                    if shape[0] <= slots:
                        return here, shape
            lacking = "; ".join(answer for answer in found.values() if isinstance(answer, str))
            if waited > patience or self._requests:
                raise ConfigError(lacking)
            if not waits:
                print_to_stderr(f"{clock()} waiting up to {patience / 60:g} min (timeout_minutes) for hosts: {lacking}")
                waits = True
            time.sleep(AGAIN)

    def start_agents(self, hosts: dict[str, Answer], shape: Shape) -> dict[str, subprocess.Popen[bytes]]:
        job, first, start = self._job, next(iter(hosts)), 0
        address = hosts[first]["address"] if first else "127.0.0.1"
        environment = job.environment | rendezvous(address, job.port or hosts[first]["port"], shape)
        agents: dict[str, subprocess.Popen[bytes]] = {}
        for host in hosts:
            devices = job.hosts[host][: shape[0] - start]
            if not devices:
                break
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if host else {}
            numbers = range(start, start := start + len(devices))
            agents[host] = self.start_agent(agent_words(host, self._run), shape, numbers, environment | visible)
        return agents

    def describe_fault(self, host: str, code: int) -> str:
        if host and code == LOST:
            return f"host {host}: the connection to it, or its agent there, is gone"
        return super().describe_fault(host, code)

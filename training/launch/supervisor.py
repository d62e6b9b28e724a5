"""Supervise a run: start it on its hosts, and restart it after a fault (`max_restarts`).

An entry point that no launcher started becomes this process (`training.launch.start`), which holds neither torch nor a
config. On each host it has an agent (`training.launch.agent`), which it commands through a pipe, over ssh on another
machine. When one of them fails, or somebody asks for an end, all are asked to end. The pipes end with this process, so
no agent outlives it.

Any end is a fault but a stop that somebody asked for, by a signal to any process of the run, and a user's mistake (exit
code 2) at the first start; a run that began once and then cannot begin has lost a host or a port. After a fault all
hosts are inspected, and what is left of the run there is killed. The run resumes from its newest whole checkpoint: on
all hosts if they answer within RETURN seconds, else on those that do, in the largest topology that fits. While none
fits, it waits.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from common import early_signals
from training.errors import EXIT_CODE, INTERRUPTED, ConfigError, print_to_stderr
from training.launch.agent import FAILED, FAREWELL, POLL
from training.launch.hosts import Answer, inspect_hosts, start_agent
from training.launch.slurm import requeue

JOB = "PIPETUNE_JOB"  # in the environment: a `Job` without its command, as JSON
# Exit codes of ranks that somebody has asked to save and leave.
STOPPED = (INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
LOST = 255  # exit code of an ssh that has lost its connection
MARGIN = 5.0  # seconds more than an agent takes at most
RETURN, AGAIN = 30.0, 2.0  # seconds until a run goes on without a host, and between two inspections
FRUITLESS = 2  # restarts in a row without a step, after which the fault counts as permanent

Shape = tuple[int, list[str], str]  # of a topology: number of processes, overrides of the config, name


@dataclass
class HostedRun:
    """What to run and where.

    Attributes:
        environment: of the ranks on every host.
        hosts: the devices of each that may be used; the one with an empty name is this machine.
        shapes: the topologies that may be used, the configured one first.
        patience: seconds to wait for hosts without which no topology fits, and for ranks that save before they leave.
        signals: those of `preemption_signals`.
        port: of the rendezvous; None for any.
    """

    command: list[str]
    environment: dict[str, str]
    hosts: dict[str, list[int]]
    shapes: list[Shape]
    save_path: str
    max_restarts: int
    patience: float
    signals: list[int]
    port: int | None


def main() -> None:
    """Supervise the job that `training.launch.start` has put into the environment."""
    sys.exit(Supervisor(HostedRun(command=sys.argv[1:], **json.loads(os.environ.pop(JOB)))).supervise())


class Supervisor:
    """Runs a job to its end."""

    def __init__(self, job: HostedRun) -> None:
        self._job = job
        self._run = os.urandom(8).hex()
        self._failed_at = self._ended_at = 0.0  # when the last attempt failed, and when none of its processes was left
        self._requests: list[int] = []  # signals by which somebody asked for the end
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *job.signals):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda number, _: self._requests.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*early_signals.ALL, *job.signals})  # blocked by `launch`

    def supervise(self) -> int:
        """Return the exit code of the run, or of its last start."""
        job, restarts, fruitless = self._job, 0, 0
        try:
            hosts, shape = self._choose_hosts(0)
        except ConfigError as error:
            print_to_stderr(f"error: {error}")
            return EXIT_CODE
        self._leave_if_asked()
        while True:
            host, code = self._attempt(hosts, shape)
            if code and self._requests:
                return 128 + self._requests[0]
            if code in (0, *STOPPED, *(128 + number for number in job.signals)) or (code == EXIT_CODE and not restarts):
                return code
            before = newest(hosts)
            after = newest({host: each for host, each in self._inspect().items() if not isinstance(each, str)})
            moved = after["changed"] != before["changed"] and after["step"] > before["saved"]
            fruitless = 0 if moved or not restarts else fruitless + 1
            fault, end = describe_fault(host, code), ""
            if restarts == job.max_restarts:
                end = f"; no restart is left (max_restarts: {restarts})" if restarts else ""
            elif fruitless == FRUITLESS:
                end = f"; {fruitless} restarts in a row came to no step, so the fault does not pass"
            else:
                try:
                    hosts, shape = self._choose_hosts(job.patience)
                except ConfigError as error:
                    end = f"; no topology fits the hosts that answer: {error}"
            if self._requests:
                print_to_stderr(f"error: {fault}; an end was asked for before it could go on")
                return 128 + self._requests[0]
            if end or not job.max_restarts:
                if end or code != 1:  # else a rank has printed the reason
                    print_to_stderr(f"error: {fault}{end}")
                return code
            restarts += 1
            where = f" on {', '.join(hosts)}" if host else ""
            print_to_stderr(
                f"{clock()} restart {restarts} of {job.max_restarts}: {fault}; nothing of the run was left after "
                f"{self._ended_at - self._failed_at:.1f} s; it goes on with {shape[2]}{where}"
            )

    def _leave_if_asked(self) -> None:
        """Leave with a line, before there are ranks to ask."""
        if self._requests:
            if self._requests[0] in self._job.signals:
                requeue()
            early_signals.leave(self._requests[0])

    def _inspect(self) -> dict[str, Answer | str]:
        return inspect_hosts(list(self._job.hosts), self._run, self._job.save_path)

    def _choose_hosts(self, patience: float) -> tuple[dict[str, Answer], Shape]:
        """Choose the hosts to run on, and the topology; raise a ConfigError with those that do not answer.

        Args:
            patience: seconds to wait for hosts that do not answer; 0: all have to.
        """
        job, begin, waits = self._job, time.monotonic(), False
        while True:
            found = self._inspect()
            here = {host: answer for host, answer in found.items() if not isinstance(answer, str)}
            slots = sum(len(job.hosts[host]) for host in here)
            waited = time.monotonic() - begin
            if len(here) == len(found) or waited > min(RETURN, patience) > 0:
                for shape in job.shapes:
                    if shape[0] <= slots:
                        return here, shape
            lacking = "; ".join(answer for answer in found.values() if isinstance(answer, str))
            if waited > patience or self._requests:
                raise ConfigError(lacking)
            if not waits:
                print_to_stderr(f"{clock()} waiting up to {patience / 60:g} min (timeout_minutes) for hosts: {lacking}")
                waits = True
            time.sleep(AGAIN)

    def _attempt(self, hosts: dict[str, Answer], shape: Shape) -> tuple[str, int]:
        """Run the job once, until all its processes have ended; return the first host that failed and its exit code."""
        job = self._job
        agents = self._start_agents(hosts, shape)
        failed, sent, deadline = ("", 0), 0, math.inf
        while None in [agent.poll() for agent in agents.values()]:
            if not failed[1]:
                failed, self._failed_at = first_failure(agents), time.monotonic()
            if max(len(self._requests), bool(failed[1])) > sent:
                sent += 1
                deadline = min(deadline, time.monotonic() + (FAREWELL if failed[1] else job.patience) + MARGIN)
                if failed[1]:
                    line = FAILED.decode()
                else:
                    number = self._requests[sent - 1]
                    line = str(number if number in job.signals else int(signal.SIGTERM))
                for agent in agents.values():
                    send(agent, line)
            if time.monotonic() > deadline:  # an agent or its host is frozen
                for agent in agents.values():
                    agent.kill()
            time.sleep(POLL)
        self._ended_at = time.monotonic()
        return failed if failed[1] else first_failure(agents)

    def _start_agents(self, hosts: dict[str, Answer], shape: Shape) -> dict[str, subprocess.Popen[bytes]]:
        job, (processes, overrides, _) = self._job, shape
        first, start = next(iter(hosts)), 0
        rendezvous = {
            "MASTER_ADDR": hosts[first]["address"] if first else "127.0.0.1",
            "MASTER_PORT": str(job.port or hosts[first]["port"]),
            "WORLD_SIZE": str(processes),
        }
        agents: dict[str, subprocess.Popen[bytes]] = {}
        for host in hosts:
            devices = job.hosts[host][: processes - start]
            if not devices:
                break
            environment = job.environment | rendezvous
            if host:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
            order = {
                "command": job.command + overrides,
                "environment": environment,
                "numbers": list(range(start, start := start + len(devices))),
                "patience": job.patience,
                "signals": job.signals,
            }
            agents[host] = start_agent(host, self._run)
            send(agents[host], json.dumps(order))
        return agents


def first_failure(agents: dict[str, subprocess.Popen[bytes]]) -> tuple[str, int]:
    """Return a host whose agent failed, and the exit code as a shell would give it; 0 if none did."""
    ends = ((host, agent.returncode) for host, agent in agents.items())
    return next(((host, code if code > 0 else 128 - code) for host, code in ends if code), ("", 0))


def send(agent: subprocess.Popen[bytes], line: str) -> None:
    """Send a line to an agent, which may be gone."""
    assert agent.stdin
    with suppress(OSError):
        agent.stdin.write(f"{line}\n".encode())
        agent.stdin.flush()


def newest(answers: dict[str, Answer]) -> Answer:
    """Return the answer of the host on which the run wrote last."""
    return max(answers.values(), key=lambda answer: answer["changed"], default={"changed": 0, "step": 0, "saved": 0})


def describe_fault(host: str, code: int) -> str:
    who = f"host {host}" if host else "this machine"
    if host and code == LOST:
        return f"{who}: the connection to it, or its agent there, is gone"
    if code > 128:
        with suppress(ValueError):
            return f"{who}: a process was killed by {signal.Signals(code - 128).name}"
    return f"{who}: ended with exit code {code}"


def clock() -> str:
    """Return the time, from which the log shows how long a fault took."""
    return time.strftime("%H:%M:%S")

"""Supervise a run on this machine: start it, and restart it after a fault (`max_restarts`).

An entry point that no launcher started becomes this process (`training.launch.start`), which holds neither torch nor a
config. It has an agent (`training.launch.agent`), which it commands through a pipe; an option may have agents on other
hosts. When one of them fails, or somebody asks for an end, all are asked to end. The pipes end with this process, so no
agent outlives it.

Any end is a fault but a stop that somebody asked for, by a signal to any process of the run, and a user's mistake (exit
code 2) at the first start; a run that began once and then cannot begin has lost a host or a port. After a fault what is
left of the run is killed, and it resumes from its newest whole checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from common import early_signals
from training.errors import EXIT_CODE, INTERRUPTED, ConfigError, print_to_stderr
from training.launch.agent import AGENT, FAILED, FAREWELL, POLL, RUN, Answer, inspect_host
from training.launch.slurm import requeue

JOB = "PIPETUNE_JOB"  # in the environment: a `SupervisedRun` without its command, as JSON
# Exit codes of ranks that somebody has asked to save and leave.
STOPPED = (INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
MARGIN = 5.0  # seconds more than an agent takes at most
FRUITLESS = 2  # restarts in a row without a step, after which the fault counts as permanent

Shape = tuple[int, list[str], str]  # of a topology: number of processes, overrides of the config, name


@dataclass
class SupervisedRun:
    """What to run.

    Attributes:
        patience: seconds for ranks that save before they leave.
        signals: those of `preemption_signals`.
        port: of the rendezvous; None for any.
    """

    command: list[str]
    shape: Shape
    save_path: str
    max_restarts: int
    patience: float
    signals: list[int]
    port: int | None


Job = TypeVar("Job", bound=SupervisedRun)


def main() -> None:
    """Supervise the job that `training.launch.start` has put into the environment."""
    sys.exit(Supervisor(SupervisedRun(command=sys.argv[1:], **json.loads(os.environ.pop(JOB)))).supervise())


class Supervisor(Generic[Job]):
    """Runs a job to its end. In all that goes by host, the one with an empty name is this machine."""

    def __init__(self, job: Job) -> None:
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
            hosts, shape = self.find_hosts(0)
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
            after = newest(self.inspect())
            moved = after["changed"] != before["changed"] and after["step"] > before["saved"]
            fruitless = 0 if moved or not restarts else fruitless + 1
            fault, end = self.describe_fault(host, code), ""
            if restarts == job.max_restarts:
                end = f"; no restart is left (max_restarts: {restarts})" if restarts else ""
            elif fruitless == FRUITLESS:
                end = f"; {fruitless} restarts in a row came to no step, so the fault does not pass"
            else:
                try:
                    hosts, shape = self.find_hosts(job.patience)
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

    def inspect(self) -> dict[str, Answer]:
        """Kill what is left of the run, and find how far it is."""
        return {"": inspect_host(self._job.save_path, self._run)}

    def find_hosts(self, patience: float) -> tuple[dict[str, Answer], Shape]:
        """Return where to run, inspected, and in which topology.

        Args:
            patience: seconds to wait for what does not answer; 0: all has to.

        Raises:
            ConfigError: too little answers.
        """
        return self.inspect(), self._job.shape

    def _attempt(self, hosts: dict[str, Answer], shape: Shape) -> tuple[str, int]:
        """Run the job once, until all its processes have ended; return the first host that failed and its exit code."""
        job = self._job
        agents = self.start_agents(hosts, shape)
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

    def start_agents(self, hosts: dict[str, Answer], shape: Shape) -> dict[str, subprocess.Popen[bytes]]:
        """Start an agent on each host, and order it to start its ranks."""
        place = rendezvous("127.0.0.1", self._job.port or hosts[""]["port"], shape)
        return {"": self.start_agent(AGENT, shape, range(shape[0]), place)}

    def start_agent(
        self, words: Sequence[str], shape: Shape, numbers: Sequence[int], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start an agent by a command, and order it to start these ranks; Ctrl-C does not reach it."""
        own = os.environ | {RUN: self._run}
        agent = subprocess.Popen(words, stdin=subprocess.PIPE, env=own, start_new_session=True)
        order = {
            "command": self._job.command + shape[1],
            "environment": environment,
            "numbers": list(numbers),
            "patience": self._job.patience,
            "signals": self._job.signals,
        }
        send(agent, json.dumps(order))
        return agent

    def describe_fault(self, host: str, code: int) -> str:
        """Say in a line how a host's ranks have ended."""
        who = f"host {host}" if host else "this machine"
        if code > 128:
            with suppress(ValueError):
                return f"{who}: a process was killed by {signal.Signals(code - 128).name}"
        return f"{who}: ended with exit code {code}"


def rendezvous(address: str, port: int, shape: Shape) -> dict[str, str]:
    """Return the variables by which ranks meet."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(shape[0])}


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


def clock() -> str:
    """Return the time, from which the log shows how long a fault took."""
    return time.strftime("%H:%M:%S")

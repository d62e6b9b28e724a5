"""Stays beside a run that a door started: has it started on its hosts, and again after a fault (`max_restarts`).

A door that no launcher started becomes this process (`training.launch.start`), which holds neither torch nor a
config. On each host it has an agent (`training.launch.agent`), to which it speaks through a pipe, over ssh where
the host is another machine. When one of them fails, or somebody asks for an end, all are asked to end. So none outlives
the others for long, and none this process, with which the pipes end however it ends.

A fault is any end but a stop that somebody asked for, by a signal to any process of the run, and, of the first start, a
user's mistake (exit code 2); one that
began well and cannot begin again has lost a host or a port. After a fault all hosts are looked at again, and what is
left of the run there is killed. It goes on from the newest whole checkpoint: on all hosts if they answer within RETURN
seconds, else on those that do, in the largest topology that fits; where none does, it waits.
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

from training.errors import EXIT_CODE, INTERRUPTED, ConfigError, print_to_stderr
from training.launch.agent import FAILED, FAREWELL, LOOK
from training.launch.hosts import Answer, look, start_agent

JOB = "PIPETUNE_JOB"  # in the environment: a `Job` without its command, as JSON
# Exit codes of ranks that somebody has asked to save and leave.
STOPPED = (INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
LOST = 255  # ssh's, where there is no connection any more
MARGIN = 5.0  # seconds more than an agent takes at most
RETURN, AGAIN = 30.0, 2.0  # seconds until a run goes on without a host, and between two looks at it
FRUITLESS = 2  # restarts in a row that came to no step: the fault does not pass


@dataclass
class Job:
    """What to run and where.

    Attributes:
        environment: of the ranks on every host.
        hosts: the devices of each that may be used; the one with an empty name is this machine.
        shapes: the topologies that may be taken, the configured one first: number of processes, what to add to the
            command, and its name.
        patience: seconds to wait for hosts without which no topology fits, and for ranks that save before they leave.
        signals: those of `preemption_signals`.
        port: where the ranks meet; any free one where absent.
    """

    command: list[str]
    environment: dict[str, str]
    hosts: dict[str, list[int]]
    shapes: list[tuple[int, list[str], str]]
    save_path: str
    max_restarts: int
    patience: float
    signals: list[int]
    port: int | None


def main() -> None:
    """Supervise the job that a door has put into words."""
    sys.exit(Supervisor(Job(command=sys.argv[1:], **json.loads(os.environ.pop(JOB)))).supervise())


class Supervisor:
    """Runs a job to its end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run = os.urandom(8).hex()
        self._since = self._gone = 0.0  # when the last attempt failed, and when nothing of it was left
        self._asked: list[int] = []  # signals, by which somebody asked for the end
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *job.signals):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda number, _: self._asked.append(number))

    def supervise(self) -> int:
        """The exit code of the run, or of its last start."""
        job, restarts, fruitless = self._job, 0, 0
        try:
            hosts, shape = self._ready(0)
        except ConfigError as error:
            print_to_stderr(f"error: {error}")
            return EXIT_CODE
        while True:
            host, code = self._attempt(hosts, shape)
            if code and self._asked:
                return 128 + self._asked[0]
            if code in (0, *STOPPED, *(128 + number for number in job.signals)) or (code == EXIT_CODE and not restarts):
                return code
            before, after = furthest(hosts), furthest(self._look())
            moved = after["changed"] != before["changed"] and after["step"] > before["saved"]
            fruitless = 0 if moved or not restarts else fruitless + 1
            fault, last = described(host, code), ""
            if restarts == job.max_restarts:
                last = f"; no restart is left (max_restarts: {restarts})" if restarts else ""
            elif fruitless == FRUITLESS:
                last = f"; {fruitless} restarts in a row came to no step, so the fault does not pass"
            else:
                try:
                    hosts, shape = self._ready(job.patience)
                except ConfigError as error:
                    last = f"; no topology fits the hosts that answer: {error}"
            if self._asked:
                print_to_stderr(f"error: {fault}; an end was asked for before it could go on")
                return 128 + self._asked[0]
            if last or not job.max_restarts:
                if last or code != 1:  # else a rank has said why
                    print_to_stderr(f"error: {fault}{last}")
                return code
            restarts += 1
            where = f" on {', '.join(hosts)}" if host else ""
            told = f"restart {restarts} of {job.max_restarts}: {fault}; nothing of the run was left after"
            print_to_stderr(f"{clock()} {told} {self._gone - self._since:.1f} s; it goes on with {shape[2]}{where}")

    def _look(self) -> dict[str, Answer]:
        """What the hosts say that answer."""
        found = look(list(self._job.hosts), self._run, self._job.save_path)
        return {host: answer for host, answer in found.items() if not isinstance(answer, str)}

    def _ready(self, patience: float) -> tuple[dict[str, Answer], tuple[int, list[str], str]]:
        """The hosts to go on with, and the topology.

        Args:
            patience: seconds to wait for hosts that do not answer; 0: all have to.

        Raises:
            ConfigError: there are none; which hosts do not answer, and why.
        """
        job, begin, waits = self._job, time.monotonic(), False
        while True:
            found = look(list(job.hosts), self._run, job.save_path)
            here = {host: answer for host, answer in found.items() if not isinstance(answer, str)}
            slots = sum(len(job.hosts[host]) for host in here)
            waited = time.monotonic() - begin
            if len(here) == len(found) or waited > min(RETURN, patience) > 0:
                for shape in job.shapes:
                    if shape[0] <= slots:
                        return here, shape
            lacking = "; ".join(answer for answer in found.values() if isinstance(answer, str))
            if waited > patience or self._asked:
                raise ConfigError(lacking)
            if not waits:
                print_to_stderr(f"{clock()} waiting up to {patience / 60:g} min (timeout_minutes) for hosts: {lacking}")
                waits = True
            time.sleep(AGAIN)

    def _attempt(self, hosts: dict[str, Answer], shape: tuple[int, list[str], str]) -> tuple[str, int]:
        """Run the job once, until nothing of it is left; the host that failed first, and its exit code, or 0."""
        job, (processes, words, _) = self._job, shape
        agents: dict[str, subprocess.Popen[bytes]] = {}
        first, start = next(iter(hosts)), 0
        meeting = {"MASTER_ADDR": hosts[first]["address"] if first else "127.0.0.1"}
        meeting |= {"MASTER_PORT": str(job.port or hosts[first]["port"]), "WORLD_SIZE": str(processes)}
        for host in hosts:
            devices = job.hosts[host][: processes - start]
            if not devices:
                break
            environment = job.environment | meeting
            if host:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
            ranks = list(range(start, start := start + len(devices)))
            agents[host] = start_agent(host, self._run)
            order = {"command": job.command + words, "environment": environment, "numbers": ranks}
            say(agents[host], json.dumps(order | {"patience": job.patience, "signals": job.signals}))
        failed, told, end = ("", 0), 0, math.inf
        while None in [agent.poll() for agent in agents.values()]:
            if not failed[1]:
                failed, self._since = first_failure(agents), time.monotonic()
            if max(len(self._asked), bool(failed[1])) > told:
                told += 1
                end = min(end, time.monotonic() + (FAREWELL if failed[1] else job.patience) + MARGIN)
                number = self._asked[told - 1] if not failed[1] else 0
                asked = FAILED.decode() if failed[1] else str(number if number in job.signals else int(signal.SIGTERM))
                for agent in agents.values():
                    say(agent, asked)
            if time.monotonic() > end:  # it is frozen, or its host
                for agent in agents.values():
                    agent.kill()
            time.sleep(LOOK)
        self._gone = time.monotonic()
        return failed if failed[1] else first_failure(agents)


def first_failure(agents: dict[str, subprocess.Popen[bytes]]) -> tuple[str, int]:
    """A host whose agent has ended in a failure, and the exit code as a shell would give it; 0 where there is none."""
    ends = ((host, agent.returncode) for host, agent in agents.items())
    return next(((host, code if code > 0 else 128 - code) for host, code in ends if code), ("", 0))


def say(agent: subprocess.Popen[bytes], line: str) -> None:
    """Send a line to an agent, which may be gone."""
    assert agent.stdin
    with suppress(OSError):
        agent.stdin.write(f"{line}\n".encode())
        agent.stdin.flush()


def furthest(answers: dict[str, Answer]) -> Answer:
    """What the host says on which the run has written last."""
    return max(answers.values(), key=lambda answer: answer["changed"], default={"changed": 0, "step": 0, "saved": 0})


def described(host: str, code: int) -> str:
    """A fault, for people."""
    who = f"host {host}" if host else "this machine"
    if host and code == LOST:
        return f"{who}: the connection to it, or its agent there, is gone"
    if code <= 128:
        return f"{who}: ended with exit code {code}"
    with suppress(ValueError):
        return f"{who}: a process was killed by {signal.Signals(code - 128).name}"
    return f"{who}: ended with exit code {code}"


def clock() -> str:
    """The time, by which the log tells how long a fault took."""
    return time.strftime("%H:%M:%S")

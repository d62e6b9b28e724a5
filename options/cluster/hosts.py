"""Read a hostfile, and reach its hosts over ssh."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from common.terminal import safe_line
from data.paths import read_small
from training.errors import ConfigError
from training.launch.agent import AGENT, RUN, Answer, inspect_host

FILTER = re.compile(r"[^@:]+(:\d+(,\d+)*)?(@[^@:]+(:\d+(,\d+)*)?)*")  # of --include and --exclude
CONNECT = 10  # seconds for ssh to connect
ANSWER = 30  # seconds for a host to answer
SSH = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}")  # asks no questions
KEEPALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")  # notices a lost host after 15 s
SAME = "the same folder, Python and packages on every host"
EXPECTED = {  # part of ssh's message -> what was expected
    "Permission denied": "a key that it accepts without a password: ssh-copy-id {host}",
    "Host key verification failed": "its key in ~/.ssh/known_hosts: log in once by hand, ssh {host}",
    "Could not resolve": "a name that this machine knows",
    "refused": "sshd to run there",
    "No such file": SAME,
    "can't cd": SAME,
    "not found": SAME,
    "No module": SAME,
}


def read_hostfile(path: str, include: str, exclude: str) -> dict[str, list[int]]:
    """Read the slots of each host as DeepSpeed's launcher does."""
    from deepspeed.launcher import runner

    runner.logger.setLevel("CRITICAL")  # it would print the whole file
    for option, words in (("--include", include), ("--exclude", exclude)):
        if words and not FILTER.fullmatch(words):
            raise ConfigError(
                f"{option} {words!r}: expected hosts, with the numbers of slots or all, as node1@node2:0,1"
            )
    expected = "lines such as: node1 slots=8"
    try:
        # DeepSpeed's own reader takes the byte order mark of Windows for a part of the first name.
        lines = read_small(path).decode("utf-8-sig").splitlines()
        if all(not line.strip() or line.lstrip().startswith("#") for line in lines):
            raise ValueError("names no host")
        pool = runner._parse_hostfile(lines)
        expected = "hosts and slots that stand in it"
        chosen: dict[str, list[int]] = runner.parse_inclusion_exclusion(pool, include, exclude)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition(", unable to proceed")[0]
        raise ConfigError(f"--hostfile {path}: {reason}; expected {expected}") from None
    if not any(chosen.values()):
        raise ConfigError(
            f"--hostfile {path}: no slot is left; expected hosts that --include and --exclude leave, with slots="
        )
    return {host: slots for host, slots in chosen.items() if slots}


def exported_variables() -> dict[str, str]:
    """Return the variables for every host: what DeepSpeed's launcher exports, gloo's, OpenMP's, `.deepspeed_env`."""
    from deepspeed.launcher import runner

    names = (*runner.EXPORT_ENVS, "NCCL", "GLOO", "LD_LIBRARY", "OMP", "PATH")
    found = {name: value for name, value in os.environ.items() if name.startswith(names)}
    for folder in runner.DEEPSPEED_ENVIRONMENT_PATHS:
        with suppress(FileNotFoundError):
            lines = read_small(Path(folder) / runner.DEEPSPEED_ENVIRONMENT_NAME).decode().splitlines()
            found |= dict(line.split("=", maxsplit=1) for line in lines if "=" in line)
    return found


def agent_words(host: str, run: str) -> list[str]:
    """Return the command that starts an agent on a host; without a name here."""
    return [*SSH, *KEEPALIVE, "--", host, remote_command("env", f"{RUN}={run}", *AGENT)] if host else [*AGENT]


def inspect_hosts(hosts: list[str], run: str, save_path: str) -> dict[str, Answer | str]:
    """Run `inspect_host` on all hosts at once; return its answer, or why a host does not answer."""
    with ThreadPoolExecutor(len(hosts)) as threads:
        return dict(zip(hosts, threads.map(lambda host: _inspect(host, run, save_path), hosts), strict=True))


def remote_command(*words: str) -> str:
    """Quote a command for the shell of another host, in the same folder."""
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


def _inspect(host: str, run: str, save_path: str) -> Answer | str:
    if not host:
        return inspect_host(save_path, run)
    # Without the run's name in the environment: if two names are one machine, each would kill the other.
    try:
        done = subprocess.run(
            [*SSH, "--", host, remote_command(*AGENT, save_path, run)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"host {host}: no answer within {ANSWER} s"
    except FileNotFoundError:
        return "ssh: not found; expected OpenSSH's client"
    if done.returncode == 0:
        found: Answer = json.loads(done.stdout.splitlines()[-1])
        return found
    message = next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}").strip()
    expected = next((text for words, text in EXPECTED.items() if words in message), "this to work: ssh {host} true")
    return safe_line(f"host {host}: {message}; expected {expected.format(host=host)}")

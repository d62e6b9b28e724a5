"""A host that is lost, or never comes, is named, and the run ends everywhere; the same command resumes it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cases import tiered
from tests.cluster.hosts import Host, deepspeed, host_errors, in_two_stages
from tests.launching import Launch, eventually, metrics, run, start

pytestmark = pytest.mark.launched

PATIENCE = 0.25  # minutes, of a run that is to hang
RUNNER = deepspeed(Path())[0]
UNREACHABLE = "rank 1 (stage 1, host node2) cannot be reached any more"


def lose_power(host: Host) -> None:
    host.link("down")
    host.die()


def get_power(host: Host) -> None:
    host.boot()
    host.link("up")


def pull_the_cable(host: Host) -> None:
    host.link("down")


def put_it_back(host: Host) -> None:
    host.link("up")


# What happens to the host, what mends it, and what the error says.
FAULTS: dict[str, tuple[Callable[[Host], None], Callable[[Host], None], str]] = {
    "power": (lose_power, get_power, UNREACHABLE),
    "killed": (Host.die, Host.boot, "rank 1 (stage 1, host node2) died without an error"),
    "cable": (pull_the_cable, put_it_back, UNREACHABLE),
    "frozen": (Host.freeze, Host.thaw, "rank 1 (stage 1, host node2) hangs and does not answer"),
}


@pytest.mark.parametrize("name", tiered(FAULTS, quick=(), slow=["cable"]))
def test_a_lost_host_ends_the_run(
    name: str, hosts: list[Host], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    fault, mend, message = FAULTS[name]
    keys = {"timeout_minutes": PATIENCE} if name == "frozen" else {}
    command = in_two_stages(hosts, tmp_path, make_checkpoint("llama"), max_steps=1000, save_interval=5, **keys)
    launch = begun(command, tmp_path / "run")
    fault(hosts[1])
    begin = time.monotonic()
    result = launch.end()
    print(f"{name}: the command ended after {time.monotonic() - begin:.1f} s")
    assert result.returncode != 0
    assert [line for line in host_errors(result) if message in line], result.stdout + result.stderr
    eventually(lambda: not hosts[0].processes())
    mend(hosts[1])
    eventually(lambda: not hosts[1].processes())
    again = begun(command, tmp_path / "run")
    assert "resumed: " in again.stdout
    again.kill()
    eventually(lambda: not any(host.processes() for host in hosts))


def press_ctrl_c(hosts: list[Host], launch: Launch) -> None:
    """Send SIGINT as a terminal does: to every process of the command, but to none that ssh has started."""
    for number in hosts[0].processes():
        with suppress(ProcessLookupError):
            if os.getpgid(number) == os.getpgid(launch.pid):
                os.kill(number, signal.SIGINT)


def kill(word: str) -> Callable[[list[Host], Launch], None]:
    """Return a fault that kills a process of the command on its own host."""

    def fault(hosts: list[Host], _: Launch) -> None:
        (found,) = (number for number, line in hosts[0].processes().items() if line.split()[1:2] == [word])
        os.kill(found, signal.SIGKILL)

    return fault


@pytest.mark.longest
@pytest.mark.parametrize(
    "end", [press_ctrl_c, kill(RUNNER), kill("-S")], ids=["Ctrl-C", "deepspeed is killed", "pdsh is killed"]
)
def test_nothing_outlives_a_command(
    end: Callable[[list[Host], Launch], None], hosts: list[Host], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    launch = begun(in_two_stages(hosts, tmp_path, make_checkpoint("llama"), max_steps=1000), tmp_path / "run")
    end(hosts, launch)
    launch.end()  # DeepSpeed's exit code is 0 where its pdsh was killed
    eventually(lambda: not any(host.processes() for host in hosts))
    assert (tmp_path / "run/latest").read_text() == f"step-{len(metrics(tmp_path / 'run')):06d}"


def refuse_the_key(host: Host) -> None:
    (host.folder / "ssh/authorized_keys").rename(host.folder / "ssh/refused")


def take_the_key(host: Host) -> None:
    (host.folder / "ssh/refused").rename(host.folder / "ssh/authorized_keys")


@pytest.mark.longest
@pytest.mark.parametrize(
    ("away", "mend", "printed"),
    [(refuse_the_key, take_the_key, "Permission denied"), (Host.freeze_sshd, Host.thaw_sshd, "")],
    ids=["key", "frozen"],
)
def test_a_host_that_never_comes_is_named(
    away: Callable[[Host], None],
    mend: Callable[[Host], None],
    printed: str,
    hosts: list[Host],
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    command = in_two_stages(hosts, tmp_path, make_checkpoint("llama"))
    away(hosts[1])
    try:
        result = run(*command)
    finally:
        mend(hosts[1])
    assert result.returncode != 0
    (line,) = host_errors(result)
    assert "error: rank 1 (host node2) did not come to 10.77.0.1:29500" in line
    assert printed in result.stderr and "Traceback" not in result.stderr
    eventually(lambda: not any(host.processes() for host in hosts))


def begun(command: list[str], run: Path) -> Launch:
    """Start a run, and wait until it has trained a few steps more."""
    done = len(metrics(run)) if (run / "metrics.jsonl").exists() else 0
    launch = start(*command)
    launch.until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > done + 6)
    return launch

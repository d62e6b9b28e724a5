"""The rendezvous of a run's ranks: addresses, ports, timeouts and errors."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from training.distributed.processes import ProcessInfo
from training.distributed.rank_monitor import open_port
from training.distributed.rendezvous import listen
from training.errors import ConfigError
from training.launch.agent import free_port

ALONE = (1, 1)
TWO_MACHINES = (2, 1)

STARTED = """
import os, sys
from datetime import timedelta
import psutil, torch
from training.distributed.joining import join
from training.distributed.processes import ProcessInfo
from training.errors import ConfigError
try:
    join(ProcessInfo.from_environment(), timedelta(minutes=77))
except ConfigError as error:
    sys.exit(f"error: {error}")
group = torch.distributed.new_group([0])
print(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
print(*(os.environ.get(each) for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")))
print(torch.distributed.distributed_c10d.default_pg_nccl_timeout)
print(group._get_backend(torch.device("cpu")).options._timeout)
print({each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"})
"""


def started(address: str, port: int, **own: str) -> subprocess.CompletedProcess[str]:
    """Run one process that prints its settings; `own` are variables of its user."""
    meeting = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    environment = os.environ | meeting | {"PYTHONPATH": str(ROOT)} | own
    return subprocess.run(
        [sys.executable, "-c", STARTED], env=environment, capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_one_machine_listens_at_its_own_address_only(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    with listen(*ALONE) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("address", "ranks"), [("127.0.0.1", TWO_MACHINES), ("192.0.2.1", ALONE)])
def test_an_address_that_others_cannot_reach_is_a_warning(
    address: str, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host's own name often stands for a loopback address in its /etc/hosts; a container has its host's address."""
    monkeypatch.setenv("MASTER_ADDR", address)
    with listen(*ranks) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
        assert f"port {listener.getsockname()[1]} is open at every address" in capsys.readouterr().err


def test_a_port_in_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError) as caught:
        listen(*ALONE, other.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE


@pytest.fixture(autouse=True)
def no_allocator_of_the_tests_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_all_groups_have_the_runs_timeout_and_all_ports_its_address() -> None:
    result = started("127.0.0.1", free_port())
    assert result.returncode == 0, result.stderr
    nccl_aborts, allocator, *others = result.stdout.splitlines()[-5:]
    assert others == ["1:17:00", "1:17:00", "{'127.0.0.1'}"]
    assert allocator == "expandable_segments:True None"
    assert nccl_aborts == "0"  # before anybody can say who is lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        pytest.param({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native None", marks=pytest.mark.longest),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None backend:native"),
    ],
)
def test_an_allocator_of_the_user_stays(own: dict[str, str], expected: str) -> None:
    result = started("127.0.0.1", free_port(), **own)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-4] == expected


@pytest.mark.slow
def test_ranks_that_cannot_meet_say_so_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = started("127.0.0.1", port)
    unknown = started("no-such-host.invalid", free_port())
    for result, why in ((taken, "Address already in use"), (unknown, "no-such-host.invalid")):
        assert result.returncode == 1
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "the processes cannot meet at " in lines[0] and why in lines[0]
        assert "Traceback" not in result.stderr
    assert f":{port}: " in taken.stderr and "ports.meeting" in taken.stderr


def test_a_detectors_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"ports.failure_detector: {port}: Address already in use .* on host"):
            open_port(ProcessInfo(0, 1, 0, 1), port)

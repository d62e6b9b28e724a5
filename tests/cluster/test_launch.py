"""A host that never comes is named, and the whole command ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, in_two_stages, told
from tests.launching import eventually, run

pytestmark = [pytest.mark.launched, pytest.mark.longest]


def refuse_the_key(host: Host) -> None:
    (host.folder / "ssh/authorized_keys").rename(host.folder / "ssh/refused")


def take_the_key(host: Host) -> None:
    (host.folder / "ssh/refused").rename(host.folder / "ssh/authorized_keys")


# What keeps the host away, what mends it, and what ssh says of it, if anything.
REASONS: dict[str, tuple[Callable[[Host], None], Callable[[Host], None], str]] = {
    "key": (refuse_the_key, take_the_key, "Permission denied"),
    "frozen": (Host.freeze_sshd, Host.thaw_sshd, ""),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_host_that_never_comes_is_named(
    reason: str, hosts: list[Host], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    away, mend, said = REASONS[reason]
    command = in_two_stages(hosts, tmp_path, make_checkpoint("llama"))
    away(hosts[1])
    try:
        result = run(*command)
    finally:
        mend(hosts[1])
    assert result.returncode != 0
    (line,) = told(result)
    assert "error: rank 1 (host node2) did not come to 10.77.0.1:29500" in line
    assert said in result.stderr and "Traceback" not in result.stderr
    eventually(lambda: not any(host.processes() for host in hosts))

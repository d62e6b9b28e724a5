"""Three hosts, of which each has a stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import filled
from tests.cluster.hosts import Hosts, lacking
from tests.cluster.test_two_hosts import configured, trained
from tests.launching import metrics, topology

pytestmark = [pytest.mark.launched, pytest.mark.longest]


def test_three_hosts_train_as_one(make_checkpoint: Callable[..., Path], alone: list[float], tmp_path: Path) -> None:
    """And go on, by the same command, to the same bits."""
    if reason := lacking():
        pytest.skip(reason)
    with Hosts(3, tmp_path) as hosts:
        disks = [filled(host.folder / "disk", make_checkpoint("llama")) for host in hosts]
        for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4)):
            configured(disks, tmp_path / name, model_topo=topology((3, 1)), max_steps=steps, save_interval=2)
            result = trained(hosts, tmp_path)
            assert result.returncode == 0, result.stdout + result.stderr
            assert "replica 0   node1   => node2   => node3" in result.stdout
            assert not any(host.processes() for host in hosts)
    assert "resumed: " in result.stdout
    straight, resumed = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("straight", "resumed"))
    assert straight == resumed == pytest.approx(alone, rel=1e-5)

"""`--check` over two hosts on a slow network: hosts, placement and links, which a plan then uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from options.planner.links import Links
from tests.cluster.hosts import Host, in_two_stages
from tests.launching import run

pytestmark = [pytest.mark.launched, pytest.mark.slow]

DELAY = 0.02  # seconds
RATE = 2.5e6  # bytes/s


def test_hosts_are_compared_and_links_measured(
    hosts: list[Host], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    command = in_two_stages(hosts, tmp_path, make_checkpoint("llama"), "--check")
    hosts[1].slow(DELAY, RATE)
    try:
        result = run(*command)
    finally:
        hosts[1].fast()
    assert result.returncode == 0, result.stdout + result.stderr
    for expected in ("1 of 1 links between stages cross hosts", "eth0 10.77.0.2", "stage 0 to 1", "checked: "):
        assert expected in result.stdout
    assert not (tmp_path / "run/metrics.jsonl").exists()
    links = Links.read(tmp_path / "run", print)
    assert links and links.hosts == ["node1", "node2"] and not links.sums
    (link,) = links.stages
    assert DELAY / 2 < link.latency < 4 * DELAY
    assert RATE / 2 < link.bandwidth < 1.2 * RATE
    planned = run(sys.executable, "train_ds.py", "--config", tmp_path / "run.yml", "--plan")
    assert "links: measured by --check on node1 and node2 (links.json)" in planned.stdout

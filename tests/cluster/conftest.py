"""Two hosts for the tests of a file, or a reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Host, Hosts, lacking


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two hosts, of which each has a disk of its own at /mnt."""
    if reason := lacking():
        pytest.skip(reason)
    with Hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made

"""Measured links are the same on all ranks, are kept in the run's folder, and used by its plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from options.planner.inputs import Basis
from options.planner.links import FILE, Link, Links
from options.planner.plan import Plan
from tests.launching import topology
from tests.options.planner.helpers import basis_of, config_of, llama
from tests.ranks import Ranks
from tests.training.test_preflight import CONFIG
from training.config.model_topo import ModelTopo

FAST, SLOW = Link(latency=1e-5, bandwidth=1e10), Link(latency=0.02, bandwidth=1e7)


@pytest.mark.launched
def test_ranks_measure_the_same_links(ranks: Ranks, tmp_path: Path) -> None:
    shapes = {"stages": (2, 1), "replicas": (1, 2)}
    cases = [{"name": name, "config": CONFIG | {"model_topo": topology(dims)}} for name, dims in shapes.items()]
    ranks.run(2, "links", cases, tmp_path)
    for name, (stages, replicas) in shapes.items():
        first, second = (Links.model_validate_json((tmp_path / f"{name}.{rank}.json").read_bytes()) for rank in (0, 1))
        assert first == second
        assert first.fits(ModelTopo(process_topology={"dims": [stages, replicas]}))
        assert not first.fits(ModelTopo(process_topology={"dims": [replicas, stages]}))
        (link,) = first.stages or first.sums
        assert 0 < link.latency < 1 and link.bandwidth > 1e6


def test_links_are_kept_and_a_damaged_file_is_ignored(tmp_path: Path) -> None:
    links = Links(hosts=["node1", "node2"], stages=[SLOW], sums=[])
    links.write(tmp_path)
    warnings: list[str] = []
    assert Links.read(tmp_path, warnings.append) == links and not warnings
    (tmp_path / FILE).write_text('{"hosts": [], "stages": [{"latency": -1, "bandwidth": 0}], "sums": []}')
    assert Links.read(tmp_path, warnings.append) is None
    assert warnings == [f"{tmp_path / FILE}: ignored: damaged"]
    assert Links.read(tmp_path / "nowhere", warnings.append) is None and len(warnings) == 1


def test_a_plan_waits_for_a_slow_link_and_only_there(tmp_path: Path) -> None:
    basis = basis_of(llama(tmp_path), config_of(tmp_path, 4))

    def seconds(*links: Link) -> float:
        return Plan(replace(basis, links=Links(hosts=[], stages=list(links), sums=[])), [9, 8, 8, 9]).seconds

    fast = seconds(FAST, FAST, FAST)
    work = basis.workload
    size = work.micro_tokens * basis.spec.config.hidden_size * 2
    first, last = seconds(SLOW, FAST, FAST), seconds(FAST, FAST, SLOW)
    assert first > fast and last > fast
    # Each micro-batch crosses the link twice, there and back, and few of the messages hide behind work.
    assert first - fast > basis.micro_batches * SLOW.seconds(size)
    assert seconds(SLOW, SLOW) == Plan(basis, [9, 8, 8, 9]).seconds  # of another number of stages: not counted


def test_replicas_sum_over_the_slowest_link(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, model_topo=topology((1, 2)))
    plain = basis_of(llama(tmp_path), config)
    slow = replace(plain, links=Links(hosts=[], stages=[], sums=[SLOW]))
    assert slow.sums_bandwidth == SLOW.bandwidth
    assert plain.sums_bandwidth == plain.device.link
    weights = sum(shape.numel() for layer in range(plain.spec.n_layers) for shape in plain.spec.shapes(layer).values())
    more = Plan.make(slow).seconds - Plan.make(plain).seconds
    assert more > weights * 2 / SLOW.bandwidth  # in bf16 each weight alone is handed round once


def test_only_links_of_the_same_machines_count(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2)
    spec = llama(tmp_path)
    basis = basis_of(spec, config)
    folder = Path(config.save_path)
    folder.mkdir(parents=True, exist_ok=True)
    Links(hosts=["node1", "node2"], stages=[SLOW], sums=[]).write(folder)
    with_links, _ = Basis.of_run(config, spec, basis.workload, basis.device)
    assert with_links.transfers(1e7) == [SLOW.seconds(1e7)]
    others, _ = Basis.of_run(config, spec, basis.workload, basis.device, calibrated=False)
    assert others.links is None

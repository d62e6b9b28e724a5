"""Stages and replicas on hosts: sums stay inside a host if possible, then fewest messages cross."""

from __future__ import annotations

from typing import Any

import pytest

from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo
from training.config.yaml_file import checked
from training.distributed.placement import Placement, choose_axes


def config_of(dims: list[int], **grid: Any) -> TrainConfig:
    keys: dict[str, Any] = {"model_path": "model", "data_path": "records", "save_path": "run", "train_batch_size": 12}
    return checked(TrainConfig, keys | {"model_topo": {"process_topology": {"dims": dims} | grid}})


def hosts_of(*slots: int) -> list[str]:
    return [f"node{number}" for number, count in enumerate(slots, 1) for _ in range(count)]


@pytest.mark.parametrize(
    ("dims", "slots", "axes", "split_sums", "crossings"),
    [
        ([2, 1], (1, 1), ["pipe", "data"], 0, 1),
        ([2, 2], (2, 2), ["pipe", "data"], 0, 2),  # sums inside, both pipelines across
        ([4, 2], (4, 4), ["pipe", "data"], 0, 2),
        ([2, 4], (2, 2, 2, 2), ["data", "pipe"], 2, 0),  # no host holds four replicas, but each a whole pipeline
        ([2, 3], (2, 2, 2), ["data", "pipe"], 2, 0),
        ([3, 2], (2, 2, 2), ["pipe", "data"], 0, 4),
        ([1, 2], (1, 1), ["pipe", "data"], 1, 0),
    ],
)
def test_sums_stay_inside_then_fewest_messages_cross(
    dims: list[int], slots: tuple[int, ...], axes: list[str], split_sums: int, crossings: int
) -> None:
    config, lines = choose_axes(config_of(dims), hosts_of(*slots))
    topology = config.model_topo
    assert topology.process_topology.axes == axes
    assert [topology.stages, topology.replicas] == dims
    placement = Placement(topology, tuple(hosts_of(*slots)))
    assert (placement.split_sums, placement.crossings) == (split_sums, crossings)
    assert len(placement.pipelines) == dims[1] and all(len(row) == dims[0] for row in placement.pipelines)
    assert lines[0].startswith("placement:") and lines[-1].endswith(f"axes: [{', '.join(axes)}]")


def test_the_configs_axes_stay_and_the_log_names_a_better_order() -> None:
    asked = config_of([2, 3], axes=["pipe", "data"])
    config, lines = choose_axes(asked, hosts_of(2, 2, 2))
    assert config == asked
    assert lines[-1] == "axes: [data, pipe] with dims: [3, 2] would cross hosts less"
    best = config_of([3, 2], axes=["data", "pipe"])
    config, lines = choose_axes(best, hosts_of(2, 2, 2))
    assert config == best and lines[-1].endswith("axes: [data, pipe]")


@pytest.mark.parametrize(
    ("dims", "slots", "axes", "sequence", "split"),
    [
        ([2, 1, 2], (2, 2), ["pipe", "data", "model"], 1, {"layers": 0, "rows": 0}),
        ([1, 1, 4], (2, 2), ["pipe", "data", "model"], 1, {"layers": 1, "rows": 0}),
        ([2, 1, 3], (2, 2, 2), ["pipe", "data", "model"], 1, {"layers": 2, "rows": 0}),
        ([2, 2, 2], (4, 4), ["model", "pipe", "data"], 1, {"layers": 4, "rows": 0}),
        ([2, 2], (2, 2), ["pipe", "data"], 2, {"layers": 0, "rows": 0}),
        ([1, 4], (3, 1), ["pipe", "data"], 2, {"layers": 0, "rows": 1}),
    ],
)
def test_the_log_counts_groups_on_several_hosts(
    dims: list[int], slots: tuple[int, ...], axes: list[str], sequence: int, split: dict[str, int]
) -> None:
    values: dict[str, Any] = {"process_topology": {"dims": dims, "axes": axes}, "sequence": sequence}
    asked = config_of([1, 1]).model_copy(update={"model_topo": ModelTopo.model_validate(values)})
    assert Placement(asked.model_topo, tuple(hosts_of(*slots))).split_groups == split
    (line,) = [line for line in choose_axes(asked, hosts_of(*slots))[1] if "axes: [" in line and "would" not in line]
    for what, count in split.items():
        counted = f"{count} groups that share {what} lie on several hosts: every block waits for the network"
        assert (counted in line) == (count > 0)


@pytest.mark.parametrize(
    ("dims", "slots", "axes"),
    [
        ([3, 2], (2, 2, 2), ["pipe", "data"]),
        ([2, 4], (2, 2, 2, 2), ["pipe", "data"]),  # [data, pipe] would keep all messages inside, but split the groups
    ],
)
def test_groups_that_share_rows_stay_inside_before_messages_do(
    dims: list[int], slots: tuple[int, ...], axes: list[str]
) -> None:
    keys = {"process_topology": {"dims": dims}, "sequence": 2}
    asked = config_of([1, 1]).model_copy(update={"model_topo": ModelTopo.model_validate(keys)})
    topology = choose_axes(asked, hosts_of(*slots))[0].model_topo
    assert topology.process_topology.axes == axes
    assert Placement(topology, tuple(hosts_of(*slots))).split_groups["rows"] == 0


def test_the_log_draws_replicas_and_hosts() -> None:
    assert choose_axes(config_of([3, 2]), hosts_of(4, 2))[1] == [
        "placement:  stage 0    stage 1    stage 2",
        "replica 0   node1   -- node1   => node2",
        "replica 1   node1   -- node1   => node2",
        "2 of 4 links between stages cross hosts (=>); replicas sum inside of their hosts; axes: [pipe, data]",
    ]
    config = config_of([2, 2])
    assert choose_axes(config, hosts_of(4)) == (config, [])  # one host needs none

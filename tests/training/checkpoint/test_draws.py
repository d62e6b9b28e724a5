"""Random numbers of a run that goes on: those that come next, or others where the device is of another kind."""

from __future__ import annotations

from typing import Any

import torch

from tests.training.checkpoint.test_folder import DATA
from training.checkpoint.folder import CheckpointRecord
from training.checkpoint.resume import draw_on, same_places
from training.config.changes import settings_of
from training.config.keys import TrainConfig
from training.topology import Topology

SEED = 7


def test_a_device_of_another_kind_begins_by_the_seed() -> None:
    states = {"cpu": torch.get_rng_state(), "device": torch.get_rng_state()}
    expected = torch.rand(3)
    torch.rand(5)
    assert draw_on(states, SEED)
    assert torch.equal(torch.rand(3), expected)
    assert not draw_on(states | {"device": torch.zeros(16, dtype=torch.uint8)}, SEED)  # as CUDA's are
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(SEED)))


def test_ranks_in_another_order_do_not_go_on_with_each_other_s_numbers() -> None:
    """Those that share layers would draw otherwise than each other, and replicas alike."""
    keys: dict[str, Any] = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 2}
    then, other = (
        TrainConfig(**keys, model_topo={"process_topology": {"axes": axes, "dims": dims}})
        for axes, dims in ((["pipe", "data", "model"], [1, 2, 2]), (["model", "data", "pipe"], [2, 2, 1]))
    )
    topology = Topology(stages=1, replicas=2, zero_stage=1, parts=[5])
    record = CheckpointRecord(step=4, topology=topology, data=DATA, settings=settings_of(then))
    assert same_places(record, topology, then) and not same_places(record, topology, other)
    assert not same_places(record, topology.model_copy(update={"replicas": 4}), then)
    assert same_places(record.model_copy(update={"settings": {}}), topology, other), "an earlier version noted none"

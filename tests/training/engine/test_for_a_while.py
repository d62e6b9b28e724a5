"""A model that is there for a while leaves no weights and no process groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import groups
from torch import distributed, nn
from torch.distributed import distributed_c10d

from training.engine.building import for_a_while


@pytest.mark.usefixtures("group")
def test_weights_groups_and_names_of_groups_are_let_go() -> None:
    linear: Any = nn.Linear(3, 4)
    module = nn.Sequential(linear, nn.BatchNorm1d(4))
    linear.weight.ds_tensor = shard = torch.ones(5)
    kept = distributed.new_group([0])
    before, known = dict(vars(groups)), set(distributed_c10d._world.pg_map)

    def build() -> SimpleNamespace:
        vars(groups)["_WORLD_GROUP"] = distributed.new_group([0])
        return SimpleNamespace(engine=SimpleNamespace(module=module))

    with for_a_while(build) as trainer:
        assert linear.weight.numel() == 12 and trainer.engine.module is module
        assert set(distributed_c10d._world.pg_map) > known
    assert not any(each.numel() for each in (*module.parameters(), *module.buffers(), shard))
    assert set(distributed_c10d._world.pg_map) == known and kept in known
    assert vars(groups) == before

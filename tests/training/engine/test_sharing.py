"""Process groups that share packed sequences or layers, and configs that cannot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from models.api import read_spec
from training.config.deepspeed_config import check_chunks, check_sharing, deepspeed_config
from training.config.keys import TrainConfig
from training.engine.building import make_groups
from training.errors import ConfigError

KEYS: dict[str, Any] = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}


def config(dims: list[int], axes: list[str], sequence: int, **keys: Any) -> TrainConfig:
    section = {"process_topology": {"axes": axes, "dims": dims}, "sequence": sequence}
    return TrainConfig.model_validate(KEYS | {"model_topo": section} | keys)


@pytest.mark.parametrize(
    ("dims", "axes", "rows", "layers"),
    [
        ([2, 4], ["pipe", "data"], [[0, 1], [2, 3], [4, 5], [6, 7]], []),
        ([4, 2], ["data", "pipe"], [[0, 2], [1, 3], [4, 6], [5, 7]], []),
        ([1, 2, 2], ["pipe", "data", "model"], [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
    ],
)
def test_neighbouring_replicas_share_rows_and_neighbouring_ranks_layers(
    dims: list[int], axes: list[str], rows: list[list[int]], layers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, **_: tuple(ranks))
    monkeypatch.setattr("training.engine.building.among_members", nullcontext)
    for rank in range(len(rows) * 2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        sharing = make_groups(config(dims, axes, 2).model_topo)
        for peers, groups in ((sharing.sequence, rows), (sharing.tensor, layers)):
            (mine,) = [group for group in groups if rank in group] or [[rank]]
            assert (peers.size, peers.rank) == (len(mine), mine.index(rank))
            assert peers.group == (tuple(mine) if groups else None)


def test_a_batch_is_counted_in_rows_that_replicas_share() -> None:
    shared = config([1, 4], ["pipe", "data"], 4, train_batch_size=2, train_micro_batch_size_per_gpu=2)
    assert deepspeed_config(shared)["train_batch_size"] == 2 * 4  # which DeepSpeed divides by as many replicas
    with pytest.raises(ValidationError, match=r"not a multiple of 4 .* 2 x 2 replicas with rows of their own"):
        config([1, 4], ["pipe", "data"], 2, train_batch_size=2, train_micro_batch_size_per_gpu=2)


def test_what_cannot_be_shared_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValidationError, match="sequence: 3 does not divide the 4 replicas"):
        config([1, 4], ["pipe", "data"], 3)
    with pytest.raises(ValidationError, match=r"axes: expected pipe and data, and model .* found \['pipe', 'model'\]"):
        config([1, 4], ["pipe", "model"], 1)
    with pytest.raises(ValidationError, match=r"dims: expected one number for each of the axes"):
        config([1, 4, 2], ["pipe", "data"], 1)
    llama = read_spec(make_checkpoint("llama"))
    check_sharing(config([1, 4], ["pipe", "data"], 4), llama)
    with pytest.raises(ConfigError, match="sequence: 8 does not divide the 4 heads of attention that llama has; exp"):
        check_sharing(config([1, 8], ["pipe", "data"], 8), llama)
    linear = read_spec(
        make_checkpoint("qwen3_next", layer_types=["linear_attention", "full_attention", "full_attention"])
    )
    with pytest.raises(ConfigError, match="in qwen3_next tokens meet elsewhere than in attention"):
        check_sharing(config([1, 2], ["pipe", "data"], 2), linear)


def test_rows_of_a_family_that_hands_nothing_on_do_not_come_in_chunks(make_checkpoint: Callable[..., Path]) -> None:
    llama = read_spec(make_checkpoint("llama"))
    check_chunks(llama)
    unable = replace(llama, family=replace(llama.family, chunks_rows=False))
    with pytest.raises(
        ConfigError, match="row_chunk: in llama tokens meet in a way that no chunk can hand on; expected"
    ):
        check_chunks(unable)

"""What the key `row_chunk` takes and refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from options import RunConfig
from tests.launching import topology
from tests.models.helpers import spec_of
from training.config.deepspeed_config import check_sharing
from training.config.keys import TrainConfig
from training.errors import ConfigError

KEYS: dict[str, Any] = {
    "model_path": "model",
    "data_path": "records.json",
    "save_path": "run",
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
STAGES = {"model_topo": topology((2, 1))}


def config_of(**keys: Any) -> TrainConfig:
    return RunConfig.model_validate(KEYS | keys)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"row_chunk": 0}, "row_chunk"),
        ({"row_chunk": "some"}, "expected a number of tokens, auto, or nothing"),
        (STAGES | {"row_chunk": 8, "schedule": "dualpipev"}, "row_chunk: not with schedule: dualpipev"),
        ({"row_chunk": 8, "offload_activations": True}, "row_chunk: not with offload_activations"),
        ({"row_chunk": 8, "fp8": {"enabled": True}, "bf16": {"enabled": True}}, "row_chunk: not with fp8.enabled, who"),
        (
            {"row_chunk": 8, "model_topo": topology((1, 2)) | {"sequence": 2}},
            "row_chunk: not with model_topo.sequence, which divides rows among processes",
        ),
        ({"row_chunk": 8, "preference": "dpo"}, "row_chunk: not with preference, whose loss needs whole rows"),
        ({"row_chunk": 8, "labels": ["a", "b"]}, "row_chunk: not with labels, whose loss needs whole rows"),
        ({"row_chunk": 8, "mtp": {}}, "row_chunk: not with mtp, whose loss needs whole rows"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        config_of(**keys)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_that_sums_in_each_backward_pass_is_refused(stage: int) -> None:
    config = config_of(row_chunk=8, zero_optimization={"stage": stage})
    with pytest.raises(ConfigError, match=f"row_chunk: not with zero_optimization.stage: {stage}.*expected 0 or 1"):
        config.check_entry_point(in_stages=False)
    config_of(row_chunk=8, zero_optimization={"stage": 1}).check_entry_point(in_stages=False)


def test_a_family_that_hands_nothing_on_is_refused() -> None:
    llama = spec_of()
    unable = replace(llama, family=replace(llama.family, chunks_rows=False))
    check_sharing(config_of(row_chunk=8), llama)
    check_sharing(config_of(), unable)
    with pytest.raises(ConfigError, match="row_chunk: in llama tokens meet in a way that no chunk can hand on; expect"):
        check_sharing(config_of(row_chunk=8), unable)


@pytest.mark.parametrize(
    "keys", [{}, STAGES, {"distillation": {"teacher": "t"}}, {"lora": {"r": 4}}, {"model_topo": topology((1, 1, 2))}]
)
def test_the_rest_is_taken(keys: dict[str, Any]) -> None:
    assert config_of(row_chunk=8, **keys).model_dump()["row_chunk"] == 8
    assert config_of(row_chunk="auto", **keys).model_dump()["row_chunk"] == "auto"

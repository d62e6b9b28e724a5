"""A run that no option plans: what is `auto` is said, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.attention.kernels import VARLEN
from tests.launching import topology
from tests.models.helpers import spec_of
from training import unplanned
from training.config.keys import TrainConfig
from training.unplanned import split_as_configured, usual_kernels

KEYS = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}
SPEC = spec_of(num_hidden_layers=3)


def config_of(**keys: Any) -> TrainConfig:
    return TrainConfig.model_validate(KEYS | keys)


def test_rows_that_nobody_chooses_are_refused() -> None:
    line = r"train_micro_batch_size_per_gpu: auto is .* options\.planner is not among the options; expected a number"
    with pytest.raises(ValueError, match=line):
        config_of(train_micro_batch_size_per_gpu="auto")


def test_layers_are_divided_evenly_and_all_recompute() -> None:
    config = config_of(use_grad_ckpt="auto", model_topo=topology((2, 1)))
    division = split_as_configured(config, SPEC, in_stages=True)
    assert division.topology.parts == [3, 2] and division.recompute == {1, 2, 3}
    assert division.report == (
        "parts: auto, as many layers in each stage, as nothing plans them",
        "gradient checkpointing: auto, all blocks, as nothing plans the memory",
    )
    plain = split_as_configured(config_of(model_topo=topology((2, 1), (2, 3))), SPEC, in_stages=True)
    assert plain.topology.parts == [2, 3] and plain.recompute == set() and plain.report == ()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_kernels_that_nobody_tries_are_the_usual_ones(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    attention, *compiled = usual_kernels(config_of(), SPEC)
    assert attention == "attention: torch's scaled_dot_product_attention"
    assert len(compiled) == on_gpu
    assert all(line.startswith("blocks: not compiled: nothing plans the run; compile: true") for line in compiled)
    assert len(usual_kernels(config_of(compile=True), SPEC)) == 1


def test_use_flash_attn_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(use_flash_attn: bool, *_: object) -> tuple[str, str]:
        return (VARLEN, "asked for") if use_flash_attn else ("sdpa", "usual")

    monkeypatch.setattr(unplanned, "choose_attention", choose)
    spec = spec_of()
    assert usual_kernels(config_of(use_flash_attn=True), spec)[0] == "attention: asked for"
    assert spec.config._attn_implementation == VARLEN

"""The usual learning rate by method and size, and the warning of one that is another method's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.api import read_spec
from models.spec import ModelSpec
from options import RunConfig
from options.planner.shapes import shape_of
from training.usual_rate import rate_warnings, usual_rate

METHODS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"lora": {}},
    "dpo": {"preference": {"loss": "dpo"}},
    "dpo, adapters": {"preference": {"loss": "dpo"}, "lora": {}},
    "orpo": {"preference": {"loss": "orpo"}},
    "reward": {"preference": {"loss": "reward"}},
}
USUAL = {
    "all weights": 2e-5,
    "adapters": 2e-4,
    "dpo": 5e-7,
    "dpo, adapters": 5e-6,
    "orpo": 8e-6,
    "reward": 1e-5,
}


def config(method: str, lr: float = 2e-5) -> RunConfig:
    keys = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 1}
    return RunConfig.model_validate(keys | {"optimizer": {"params": {"lr": lr}}} | METHODS[method])


@pytest.fixture(scope="module")
def llama_7b() -> ModelSpec:
    shape = shape_of("llama-7b")
    assert shape is not None
    return read_spec(Path("llama-7b"), shape[1])


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_its_usual_rate_at_7b(method: str, llama_7b: ModelSpec) -> None:
    assert usual_rate(config(method), llama_7b)[0] == pytest.approx(USUAL[method])


@pytest.mark.parametrize("method", METHODS)
def test_a_rate_of_another_method_is_warned_of(method: str, llama_7b: ModelSpec) -> None:
    assert rate_warnings(config(method, USUAL[method]), llama_7b) == []
    (line,) = rate_warnings(config(method, 40 * USUAL[method]), llama_7b)
    assert line.startswith(f"warning: optimizer.params.lr: {40 * USUAL[method]:g} is 40 times what is usual")


def test_a_small_model_takes_more(make_checkpoint: Callable[..., Path]) -> None:
    assert usual_rate(config("all weights"), read_spec(make_checkpoint()))[0] == 2e-4

"""Fresh weights of a derived family are those that transformers would make: the same constants, the same spread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from benchmarks.families import candidates, config_of
from models.api import read_spec
from models.architectures import FAMILIES
from models.checkpoint.source import open_source
from models.derived.derive import small_model
from models.derived.outline import Underivable
from models.errors import CheckpointError
from models.loading import SeededStates

OFTEN = ("gpt_oss", "kimi_linear", "qwen3_next", "gemma4_text")  # sinks, learned decays, linear attention, own norms
ENOUGH = 200  # numbers whose spread says something


@pytest.fixture(autouse=True)
def nan_where_nothing_was_written() -> Iterator[None]:
    """torch fills new memory so when it is asked to be deterministic; else it holds whatever was there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "model_type",
    [
        each if each in OFTEN else pytest.param(each, marks=pytest.mark.longest)
        for each in candidates()
        if each not in FAMILIES
    ],
)
def test_they_are_as_transformers_makes_them(model_type: str, tmp_path: Path) -> None:
    try:
        small_model(*config_of(model_type)).save_pretrained(tmp_path)
        spec = read_spec(tmp_path)
    except (CheckpointError, Underivable, ValueError, RuntimeError, StrictDataclassError) as error:
        pytest.skip(f"there is no such model: {error}".splitlines()[0])
    source, fresh = open_source(tmp_path, spec), SeededStates(spec, 0)
    for layer in range(spec.n_layers):
        made = fresh.read_layer(layer)
        again = SeededStates(spec, 0).read_layer(layer)
        for name, theirs in source.read_layer(layer).items():
            ours = made[name]
            assert ours.isfinite().all() and torch.equal(ours, again[name]), name
            if theirs.numel() > 1 and theirs.unique().numel() == 1:
                torch.testing.assert_close(ours, theirs, msg=name)
            elif theirs.numel() >= ENOUGH and theirs.is_floating_point():
                assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.3), name

"""Checkpoints that several test files of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.conversion.to_pipeline import hg_to_pp
from tests.models.cases import CASES
from tests.models.helpers import CONVERTERS, SHARDED


@pytest.fixture(scope="session")
def make_case(make_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """A function that writes the tiny model of a case, with further changes of its config.json."""

    def make(name: str, save: dict[str, Any] | None = None, **changes: Any) -> Path:
        case = CASES[name]
        return make_checkpoint(case.model_type, save, **case.changes | changes)

    return make


@pytest.fixture(scope="session")
def llama(make_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """A two-block llama by dtype, division into files and tying, made once each; copy it before changing it."""
    made: dict[tuple[object, ...], Path] = {}

    def get(dtype: torch.dtype = torch.float32, division: str = "single", tied: bool = False) -> Path:
        key = (dtype, division, tied)
        if key not in made:
            save = SHARDED[division]
            made[key] = make_checkpoint(save=save, dtype=dtype, tie_word_embeddings=tied, num_hidden_layers=2)
            (made[key] / "LICENSE").write_bytes("Lizenz für alle\r\n".encode())
        return made[key]

    return get


@pytest.fixture(scope="session")
def both_layouts(llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One sound model in five shards and as pipeline layers; copy a folder before changing it."""
    folder = llama(division="sharded")
    assert len(list(folder.glob("*.safetensors"))) == 5
    layers = tmp_path_factory.mktemp("both") / "layers"
    hg_to_pp(folder, layers)
    return {"huggingface": folder, "pipeline": layers}


@pytest.fixture(params=CONVERTERS)
def conversion(request: pytest.FixtureRequest, both_layouts: dict[str, Path]) -> tuple[Callable[..., None], Path]:
    """A converter with a folder that it reads."""
    return CONVERTERS[request.param], both_layouts[request.param]

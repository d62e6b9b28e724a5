"""What is timed is what the run computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from options.planner import timing
from options.planner.inputs import Workload
from tests.conftest import TINY
from tests.options.planner.helpers import spec_of
from tests.training.engine.test_numerics import config_of, unset

__all__ = ["unset"]  # a fixture


def test_layers_are_measured_as_the_run_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any, **named: Any) -> list[float]:
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        return [1.0, 1.0]

    monkeypatch.setattr(timing, "time_layer", measured)
    config = config_of(deterministic=True, max_seq_len=64)
    timing.calibrate(config, spec_of(tmp_path, TINY | {"model_type": "llama"}), Workload.assumed(config))

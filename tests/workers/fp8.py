"""Whole jobs as in `jobs.py`, whose fp8 is emulated: the GPU that it needs is not asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from models.block_options import to_fp8
from tests.workers import jobs
from training.config.keys import TrainConfig


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    emulated = patch("models.block_options.to_fp8", partial(to_fp8, emulate=True))
    with emulated, patch("training.engine.building.check_gpu"):
        jobs.run_case(case, config, folder)

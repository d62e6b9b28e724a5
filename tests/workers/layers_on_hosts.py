"""Jobs as in `hosts.py`, of a `Pipeline`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

from options.any_layers import Pipeline, PipelineConfig
from options.any_layers.config import LANGUAGE_MODEL_KEYS
from options.any_layers.stage import Layer
from options.any_layers.task import Layers
from tests.workers import hosts, jobs
from training.config.keys import TrainConfig
from training.distributed.processes import ProcessInfo
from training.distributed.rank_monitor import RankMonitor
from training.job import Job
from training.runs import run_callbacks


def train_layers(config: TrainConfig, process: ProcessInfo, monitor: RankMonitor, _: object) -> None:
    random = torch.Generator().manual_seed(1)
    dataset: Any = [tuple(torch.randn(2, 8, generator=random)) for _ in range(16)]
    layers: list[Layer] = [partial(nn.Linear, 8, 8), nn.Tanh, partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 8)]
    keys = {key: value for key, value in config.dump().items() if key not in LANGUAGE_MODEL_KEYS}
    own = PipelineConfig.model_validate(keys)
    task = Layers(Pipeline(layers, loss=functional.mse_loss), dataset)
    Job(task, own, process, monitor, run_callbacks(own, task)).run()


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    with patch.object(jobs, "run_job", train_layers):
        hosts.run_case(case, config, folder)

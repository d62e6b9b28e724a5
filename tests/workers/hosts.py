"""Jobs as in `jobs.py` by two or more ranks that pass for hosts, each with a disk of its own.

Its cases are those of `jobs.py` with "hosts", the name of each rank's host, and "disks", the folder that each is in;
paths of the config that are relative are on these disks. With "first" each rank is the first one of its host. The kind
"layers" is that of a `training.Pipeline`.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

from tests.workers import jobs
from training.config.keys import TrainConfig
from training.distributed.processes import ProcessInfo
from training.distributed.rank_monitor import RankMonitor
from training.job import Job
from training.runs import run_callbacks
from training.runs import train_language_model as run_job


def train_layers(config: TrainConfig, process: ProcessInfo, monitor: RankMonitor, _: object) -> None:
    from options.any_layers import Pipeline, PipelineConfig
    from options.any_layers.config import LANGUAGE_MODEL_KEYS
    from options.any_layers.stage import Layer
    from options.any_layers.task import Layers

    random = torch.Generator().manual_seed(1)
    dataset: Any = [tuple(torch.randn(2, 8, generator=random)) for _ in range(16)]
    layers: list[Layer] = [partial(nn.Linear, 8, 8), nn.Tanh, partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 8)]
    keys = {key: value for key, value in config.dump().items() if key not in LANGUAGE_MODEL_KEYS}
    own = PipelineConfig.model_validate(keys)
    task = Layers(Pipeline(layers, loss=functional.mse_loss), dataset)
    Job(task, own, process, monitor, run_callbacks(own, task)).run()


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    rank, before = torch.distributed.get_rank(), os.getcwd()
    named = patch.object(socket, "gethostname", lambda: case["hosts"][rank])
    job: Any = run_job
    if case["kind"] == "layers":
        job, case = train_layers, case | {"kind": "pipeline"}
    argv = patch.object(sys, "argv", [os.path.abspath(sys.argv[0]), *sys.argv[1:]])
    local = patch.dict(os.environ, {"LOCAL_RANK": "0"} if case.get("first") else {})
    with named, argv, local, patch.object(jobs, "run_job", job):
        os.chdir(case["disks"][rank])
        try:
            jobs.run_case(case, config, folder)
        finally:
            os.chdir(before)

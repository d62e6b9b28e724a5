"""A few training steps per case, their losses and gradient norms kept, case by case (see `cases.py`).

Its cases are {"name", "config": {...}}; writes <folder>/<name>.json with the steps'
"losses" and "norms".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from models.api import read_spec
from tests.workers.cases import loader_of
from training.config.keys import TrainConfig
from training.engine.pipeline import PipelineTrainer
from training.plan.auto import divide


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    name, loader = case["name"], loader_of(config)
    model_folder = Path(config.model_path)
    steps = config.n_epoches * loader.steps_per_epoch
    spec = read_spec(model_folder)
    trainer = PipelineTrainer.build(config, spec, model_folder, divide(config, spec))
    engine = trainer.engine
    losses, norms = [], []
    for step in range(steps):
        losses.append(trainer.train_step(loader, loader.batch(step)))
        norms.append(float(engine.get_global_grad_norm()))
    if engine.global_rank == 0:
        (folder / f"{name}.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    torch.distributed.barrier()
    engine.destroy()

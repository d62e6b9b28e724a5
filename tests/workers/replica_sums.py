"""A few training steps per case, and in which order the replicas' sums started, case by case (see `cases.py`).

Its cases are {"name", "config": {...}, "by_products"}; the last says whether products add to fp32 sums themselves where
they can, as on a GPU. It writes <folder>/<name>.rank<k>.json with the "norms" of the steps, and of the last one what
was "sent": to which replica, how many numbers, and whether the stage was still computing. The weights that come of it
are in <folder>/<name>.rank<k>.safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from models.api import read_spec
from tests.workers.cases import loader_of
from training.config.keys import TrainConfig
from training.engine import gradient_sums
from training.engine.pipeline import PipelineTrainer
from training.plan.auto import divide


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    loader = loader_of(config)
    model_folder = Path(config.model_path)
    spec = read_spec(model_folder)
    with patch.object(gradient_sums, "gives_fp32", lambda _: case["by_products"]):
        trainer = PipelineTrainer.build(config, spec, model_folder, divide(config, spec))
    engine = trainer.engine
    sent: list[tuple[int, int, bool]] = []
    norms = []
    reduce = torch.distributed.reduce

    def noted(tensor: torch.Tensor, **named: Any) -> Any:
        sent.append((named["group_dst"], tensor.numel(), not engine.is_gradient_accumulation_boundary()))
        return reduce(tensor, **named)

    torch.distributed.reduce = noted  # type: ignore[assignment]
    for step in range(loader.steps_per_epoch):
        sent.clear()
        trainer.train_step(loader, loader.batch(step))
        norms.append(float(engine.get_global_grad_norm()))
    torch.distributed.reduce = reduce
    stem = f"{case['name']}.rank{torch.distributed.get_rank()}"
    (folder / f"{stem}.json").write_text(json.dumps({"norms": norms, "sent": sent}))
    save_file(
        {name: weight.detach().clone() for name, weight in engine.module.named_parameters()},
        folder / f"{stem}.safetensors",
    )
    torch.distributed.barrier()
    engine.destroy()

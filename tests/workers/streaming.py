"""Trains steps under any schedule, with an evaluation after them (see `cases.py`); fp8 is emulated.

Its cases are {"name", "config": {...}, "slots": [forward, backward, a_round, heads, kept] | null, "steps": number}.
Writes <folder>/<name>.<rank>.safetensors with "losses", "norms", "evaluated", and the pieces of the weights that the
rank updates, <name>@<offset>.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from models.api import read_spec
from models.block_options import to_fp8
from options.planner.planning import divide
from options.weight_streaming.schedule import Slots, StreamedDivision
from tests.workers.cases import loader_of
from training.checkpoint.resharding import slices_of
from training.config.keys import TrainConfig
from training.runs import trainer_kind
from training.trained import with_trained


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    loader, model_folder = loader_of(config), Path(config.model_path)
    spec = with_trained(read_spec(model_folder), config)
    division = divide(config, spec)
    if case["slots"]:
        forward, backward, *others = case["slots"]
        assert isinstance(division, StreamedDivision)
        division = replace(division, slots=Slots(tuple(forward), tuple(backward), *others))
    emulated = patch("models.block_options.to_fp8", partial(to_fp8, emulate=True))
    with emulated, patch("training.engine.building.check_gpu"):
        trainer = trainer_kind(config).build(config, spec, model_folder, division)
    losses, norms = [], []
    for step in range(case["steps"]):
        losses.append(trainer.train_step(loader, loader.batch(step)))
        norms.append(float(trainer.engine.get_global_grad_norm()))
    evaluated = trainer.eval_loss(loader, loader.batch(0))
    found = {"losses": torch.tensor(losses), "norms": torch.tensor(norms), "evaluated": torch.tensor(evaluated)}
    for piece in (each for each in slices_of(trainer.engine) if each.numel):
        found[f"{piece.name}@{piece.offset:09d}"] = (
            piece.master.detach().view(-1)[piece.start :][: piece.numel].float().clone()
        )
    save_file(found, folder / f"{case['name']}.{torch.distributed.get_rank()}.safetensors")
    torch.distributed.barrier()
    trainer.engine.destroy()

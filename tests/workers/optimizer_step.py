"""A few clipped steps per case, by Pipetune's sums, clipping and step or by DeepSpeed's own (see `cases.py`).

Its cases are {"name", "config": {...}, "deepspeed": bool}; writes <folder>/<name>.<rank>.safetensors with the steps'
"losses" and "norms", under `weight.`, `gradient.` (of the last step) and `average.` (AdamW's first) what they left, and
as "reduction" how many operations the sum over the replicas took that are more than another view of a tensor.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from models.api import read_spec
from tests.workers.cases import loader_of
from training.config.keys import TrainConfig
from training.engine.pipeline import PipelineTrainer
from training.plan.auto import divide


class Operations(TorchDispatchMode):
    """Counts them, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def clip_at_once(_: Any, weights: Any, most: float, norm: torch.Tensor) -> None:
    torch.nn.utils.clip_grads_with_norm_(weights, most, norm)


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    loader, model_folder = loader_of(config), Path(config.model_path)
    spec = read_spec(model_folder)
    with ExitStack() as stack:
        if case["deepspeed"]:
            stack.enter_context(patch("training.engine.building.sum_without_copies"))
            stack.enter_context(patch("training.engine.building.clip_in_update"))
            stack.enter_context(patch("training.engine.stage_engine.clip", clip_at_once))
        trainer = PipelineTrainer.build(config, spec, model_folder, divide(config, spec))
        engine = trainer.engine
        if case["deepspeed"]:
            engine.__dict__.pop("_reduce_non_expert_gradients", None)  # of one replica
        gradients: dict[str, torch.Tensor] = {}
        take_step = engine._take_model_step

        def keep_gradients(lr_kwargs: object) -> None:
            for name, parameter in engine.module.named_parameters():
                sharded = config.zero_optimization.stage or config.bf16.enabled
                gradient = safe_get_full_grad(parameter) if sharded else parameter.grad
                gradients[f"gradient.{name}"] = gradient.detach().clone().contiguous()
            take_step(lr_kwargs)

        engine._take_model_step = keep_gradients
        operations, reduce = Operations(), engine._INSTRUCTION_MAP[schedule.ReduceGrads]

        def counted(*arguments: Any) -> None:
            with operations:
                reduce(*arguments)

        engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {schedule.ReduceGrads: counted}
        losses, norms = [], []
        for step in range(config.n_epoches * loader.steps_per_epoch):
            losses.append(trainer.train_step(loader, loader.batch(step)))
            norms.append(float(engine.get_global_grad_norm()))
    found = {"losses": torch.tensor(losses), "norms": torch.tensor(norms)} | gradients
    found["reduction"] = torch.tensor(operations.count)
    found |= {f"weight.{name}": weight.detach().clone() for name, weight in engine.module.named_parameters()}
    for number, state in enumerate(engine.optimizer.state.values()):
        found[f"average.{number}"] = state["exp_avg"].clone()
    save_file(found, folder / f"{case['name']}.{engine.global_rank}.safetensors")
    torch.distributed.barrier()
    engine.destroy()

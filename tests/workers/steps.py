"""A few training steps per case, by Pipetune's sums and clipping or by DeepSpeed's own (see `cases.py`).

Its cases are {"name", "config": {...}, "deepspeed": bool, "by_products": bool}; the last says whether products add to
fp32 sums themselves, as on a GPU. Writes <folder>/<name>.<rank>.safetensors with the steps' "losses" and "norms", the
weights and AdamW's averages that they left, as "reduction" how many operations but views the sum over the replicas took
in the last step, and as "sent" the reduces of the last step: to which replica, how many numbers, and whether the stage
was still computing.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.pipe import schedule
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from models.api import read_spec
from options.planner.planning import divide
from tests.workers.cases import loader_of
from training.config.keys import TrainConfig
from training.engine.pipeline import PipelineTrainer
from training.trained import with_trained


class Operations(TorchDispatchMode):
    """Counts operations but views."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def clip_at_once(_: Any, weights: Any, most: float, norm: torch.Tensor) -> None:
    torch.nn.utils.clip_grads_with_norm_(weights, most, norm)


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    loader, model_folder = loader_of(config), Path(config.model_path)
    spec = with_trained(read_spec(model_folder), config)
    with ExitStack() as stack:
        if case["deepspeed"]:
            stack.enter_context(patch("training.engine.building.sum_without_copies"))
            stack.enter_context(patch("training.engine.building.clip_in_update"))
            stack.enter_context(patch("training.engine.stage_engine.clip", clip_at_once))
        stack.enter_context(patch("training.engine.gradients.gives_fp32", lambda _: case["by_products"]))
        trainer = PipelineTrainer.build(config, spec, model_folder, divide(config, spec))
        engine = trainer.engine
        if case["deepspeed"]:
            engine.__dict__.pop("_reduce_non_expert_gradients", None)  # of one replica
        sent: list[tuple[int, int, bool]] = []
        reduce, sum_up = torch.distributed.reduce, engine._INSTRUCTION_MAP[schedule.ReduceGrads]

        def noted(tensor: torch.Tensor, **named: Any) -> Any:
            sent.append((named["group_dst"], tensor.numel(), not engine.is_gradient_accumulation_boundary()))
            return reduce(tensor, **named)

        def counted(*arguments: Any) -> None:
            with operations:
                sum_up(*arguments)

        engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {schedule.ReduceGrads: counted}
        stack.enter_context(patch.object(torch.distributed, "reduce", noted))
        losses, norms = [], []
        for step in range(config.n_epoches * loader.steps_per_epoch):
            sent.clear()
            operations = Operations()
            losses.append(trainer.train_step(loader, loader.batch(step)))
            norms.append(float(engine.get_global_grad_norm()))
    found = {"losses": torch.tensor(losses), "norms": torch.tensor(norms), "sent": torch.tensor(sent)}
    found["reduction"] = torch.tensor(operations.count)
    found |= {f"weight.{name}": weight.detach().clone() for name, weight in engine.module.named_parameters()}
    for number, state in enumerate(engine.optimizer.state.values()):
        if "exp_avg" in state:
            found[f"average.{number}"] = state["exp_avg"].clone()
    save_file(found, folder / f"{case['name']}.{engine.global_rank}.safetensors")
    torch.distributed.barrier()
    engine.destroy()

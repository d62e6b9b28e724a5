"""One training step per case, every gradient kept, case by case (see `cases.py`).

Its cases are {"name", "config": {...}, "kind": "pipeline" | "zero"}, and
"kernel", that of the attention, where it is not the usual one; writes
<folder>/<name>.stage<k>.safetensors with the gradient of every parameter under `<layer>.<name>`, and
<folder>/<name>.json with the step's loss and norm. Of preferences with a reference that file has the log-probabilities
of this model too, and the step compares with others: `shifted` ones, of answers to other prompts less 1. A "fault" is
one of `preference_faults`.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.utils import safe_get_full_grad
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.nn.attention import flex_attention

from models.adapters import IDLE
from models.api import read_spec
from options import RunConfig
from options.planner.planning import divide
from options.preference import reference
from options.preference.collation import judged
from tests.workers.cases import loader_of
from tests.workers.preference_faults import FAULTS
from tests.workers.zero import KINDS
from training.batches import build_loader
from training.trained import with_trained


def shifted(sums: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
    """What another model could have found: else each difference would be 0 before the first step."""
    return sums + numpy.sin(numpy.arange(sums.size, dtype=numpy.float32)).reshape(sums.shape)


def run_case(case: dict[str, Any], config: RunConfig, folder: Path) -> None:
    name, loader = case["name"], loader_of(config)
    model_folder = Path(config.model_path)
    spec = with_trained(read_spec(model_folder), config)
    if kernel := case.get("kernel"):
        spec.set_attention(kernel)
        flex_attention._validate_device = lambda *tensors: None  # it has gradients on a CPU, but does not offer them
    kind = KINDS[case["kind"]]
    trainer = kind.build(config, spec, model_folder, divide(config, spec, kind.in_stages))
    engine = trainer.engine
    gradients: dict[str, torch.Tensor] = {}
    take_step = engine._take_model_step

    torch_keeps_them = config.zero_optimization.stage == 0 and not config.bf16.enabled

    def keep_gradients(lr_kwargs: object) -> None:
        weights = engine.module.named_parameters()
        trained = ((name, each) for name, each in weights if each.requires_grad and not name.endswith(IDLE))
        for parameter_name, parameter in trained:
            gradient = parameter.grad if torch_keeps_them else safe_get_full_grad(parameter)
            gradients[parameter_name] = gradient.detach().float().clone().contiguous()
        take_step(lr_kwargs)

    engine._take_model_step = keep_gradients
    known: list[list[float]] = []
    with FAULTS[case["fault"]]() if case.get("fault") else nullcontext():
        if config.preference and config.preference.needs_reference:
            sums = reference.log_probabilities(trainer, build_loader(loader.data, config))
            if config.preference.loss == "kto":
                others = judged(loader).mismatched = reference.mismatched_loader(loader.data, config)
                sums[:, 1:] = reference.log_probabilities(trainer, others)[:, :1]
                judged(others).reference = shifted(sums)[:, 1:] - 1
            known, judged(loader).reference = sums.tolist(), shifted(sums)
        if config.preference:
            reference.estimate_kl(trainer, loader, loader.batch(0))
        loss = trainer.train_step(loader, loader.batch(0))
    if engine.global_rank % config.model_topo.replicas == 0:
        save_file(gradients, folder / f"{name}.stage{trainer.stage}.safetensors")
    if engine.global_rank == 0:
        outcome = {"loss": loss, "grad_norm": float(engine.get_global_grad_norm() or 0), "reference": known}
        (folder / f"{name}.json").write_text(json.dumps(outcome))
    torch.distributed.barrier()
    engine.destroy()

"""Some training steps of a `Pipeline` per case, see `cases.py`.

Its cases are {"name", "net", "steps", "keys": {...} of a PipelineConfig, "config"}; each stage writes
<folder>/<name>.stage<k>.safetensors with the gradients of the first step and the weights after the last, under
`gradient/<layer>.<name>` and `weight/<layer>.<name>`, rank 0 <folder>/<name>.json with the steps' losses and
norms, the loss of sample 0 alone, an evaluation, and how often the training ran the stage's first layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file

from options.any_layers.config import PipelineConfig
from options.any_layers.pipeline import Pipeline
from options.any_layers.samples import SampleLoader
from options.any_layers.stage import divide_layers
from options.any_layers.task import LayerTrainer
from tests.options.any_layers.nets import NETS
from training.config.keys import TrainConfig
from training.evaluation import Evaluation


def run_case(case: dict[str, Any], _: TrainConfig, folder: Path) -> None:
    config = PipelineConfig.model_validate(case["keys"])
    net = NETS[case["net"]]
    pipeline = Pipeline(net.layers(), loss=net.loss, forward_step=net.forward_step)
    loader = SampleLoader(net.dataset(), config)
    parts = divide_layers(pipeline.layers, config.model_topo.parts, config.model_topo.stages)
    trainer = LayerTrainer.from_layers(pipeline, loader, config, parts)
    engine, forwards = trainer.engine, []
    engine.module.forward_funcs[0].register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    tensors: dict[str, torch.Tensor] = {}
    take_step = engine._take_model_step

    def keep_gradients(lr_kwargs: object) -> None:
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            gradient = safe_get_full_grad(parameter) if config.zero_optimization.stage else parameter.grad
            tensors.setdefault(f"gradient/{name}", gradient.detach().float().clone().contiguous())
        take_step(lr_kwargs)

    engine._take_model_step = keep_gradients
    losses, norms = [], []
    for step in range(case["steps"]):
        losses.append(trainer.train_step(loader, loader.batch(step)))
        norms.append(float(engine.get_global_grad_norm()))
    alone, counted = trainer.eval_loss(loader, loader.batch_of([0])), sum(forwards)
    held_out = SampleLoader(net.dataset(), config, evaluates=True)
    evaluated = Evaluation({"": held_out}, config, 0, active=False).run(trainer, lambda _: None, bool)
    kept = engine.module.named_parameters(remove_duplicate=False)
    tensors |= {f"weight/{name}": weight.detach().clone() for name, weight in kept}
    if trainer.replica == 0:
        save_file(tensors, folder / f"{case['name']}.stage{trainer.stage}.safetensors")
    if engine.global_rank == 0:
        outcome = {"losses": losses, "norms": norms, "alone": alone, "evaluated": evaluated, "forwards": counted}
        (folder / f"{case['name']}.json").write_text(json.dumps(outcome))
    torch.distributed.barrier()
    engine.destroy()

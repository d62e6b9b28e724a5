"""Decide what a config leaves open, for runs that nothing plans: the division of the layers, and kernels."""

from __future__ import annotations

import torch

from models.attention.kernels import choose_attention
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.config.precision import training_dtype
from training.topology import Division, even_parts


def split_as_configured(config: TrainConfig, spec: ModelSpec, in_stages: bool) -> Division:
    """Divide a model without the planner: `parts: auto` is an even split, and with `use_grad_ckpt: auto` all recompute.

    Raises:
        ConfigError: the config and the model do not fit each other.
    """
    given, report = config.parts_for(spec.n_layers), list[str]()
    parts = given or even_parts(spec.n_layers, config.chunks, spec.first_layers)
    if in_stages and given is None:
        report.append("parts: auto, as many layers in each stage, as nothing plans them")
    if config.use_grad_ckpt == "auto":
        why = "nothing plans the memory" if in_stages else "it is not known how ZeRO divides the memory"
        report.append(f"gradient checkpointing: auto, all blocks, as {why}")
    topology = config.topology(parts if in_stages else [])
    return Division(topology, config.recomputed(spec.n_blocks, spec.family.sees is not None), tuple(report))


def usual_kernels(config: TrainConfig, spec: ModelSpec) -> list[str]:
    """Choose kernels without the planner, which would try them; return lines for the log."""
    attention, reason = choose_attention(config.use_flash_attn is True, training_dtype(config), spec.attention)
    spec.set_attention(attention)
    compiled = ["blocks: not compiled: nothing plans the run; compile: true compiles them"]
    return [f"attention: {reason}", *(compiled if config.compile == "auto" and torch.cuda.is_available() else [])]

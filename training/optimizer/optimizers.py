"""Optimizers by name.

Parameters whose name matches one of `no_wd_kws` form a group without weight decay. Under CPU offload DeepSpeed's own
CPU optimizers take the place of torch's (compiled at first use), unless `zero_force_ds_cpu_optimizer` is false. What
an optimizer keeps, in bytes a parameter: 8 for AdamW and Adam, 4 for Lion and for SGD with momentum, next to nothing
for Adafactor, which needs each weight in its own shape: fp32 without ZeRO (`training.config.contradictions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from lion_pytorch import Lion
from torch import Tensor, nn

from training.config.keys import TrainConfig
from training.config.sections import Optimizer
from training.errors import ConfigError

PIECE = 2**24  # elements that Lion updates at a time

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def build_optimizer(
    config: TrainConfig, parameters: NamedParameters, tied_names: tuple[str, str] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of one stage.

    Args:
        tied_names: see `parameter_groups`.

    Raises:
        ConfigError: `optimizer.params` holds something that the optimizer does not take.
    """
    compiled = config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer
    builders = _CPU_OFFLOAD_BUILDERS if compiled else _BUILDERS
    kind = config.optimizer.type
    groups = parameter_groups(config.optimizer, parameters, tied_names)
    try:
        return builders[kind](groups, **config.optimizer.params)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {kind} does not take them: {error}") from None


def parameter_groups(
    optimizer: Optimizer, parameters: NamedParameters, tied_names: tuple[str, str] | None = None
) -> list[dict[str, Any]]:
    """One group with weight decay and one without; empty ones are left out.

    Args:
        tied_names: the names of a weight that may lie on two stages, where it must be treated alike: each of them goes
            by both.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in parameters:
        names = tied_names if tied_names and name in tied_names else (name,)
        matches = any(pattern.search(each) for pattern in optimizer.no_wd_kws for each in names)
        (exempt if matches else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _lion(groups: Any, **params: Any) -> torch.optim.Optimizer:
    lion = Lion(groups, **params)
    lion.update_fn = _in_pieces(lion.update_fn)
    optimizer: torch.optim.Optimizer = lion
    return optimizer


def _in_pieces(update: Callable[..., None]) -> Callable[..., None]:
    """Lion's update, a piece of the weights at a time.

    It makes two copies of what it is given. ZeRO joins the weights of a stage into one vector, and the copies would
    take 8 bytes a parameter: more than Adam's second moment, which Lion saves.
    """

    def in_pieces(weight: Tensor, gradient: Tensor, average: Tensor, *numbers: float) -> None:
        flat = (weight.view(-1), gradient.reshape(-1), average.view(-1))
        for piece in zip(*(tensor.split(PIECE) for tensor in flat), strict=True):
            update(*piece, *numbers)

    return in_pieces


def _cpu_adamw(groups: Any, **params: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **params)
    optimizer.register_step_pre_hook(_forget_powers)
    return optimizer


def _forget_powers(optimizer: Any, *_: Any) -> None:
    """Let the kernel of DeepSpeed 0.19.8 compute the powers of the betas from the number of the step alone.

    From one step to the next it would multiply them on, and so round otherwise than a run that goes on from a
    checkpoint. An update of nothing at step 0 is what makes it begin anew.
    """
    group, nothing = optimizer.param_groups[0], torch.empty(0)
    numbers = group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"]
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, *numbers, *[nothing] * 4)


_Builder = Callable[..., torch.optim.Optimizer]
_BUILDERS: dict[str, _Builder] = {
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "Adam": partial(torch.optim.Adam, fused=True),
    "Lion": _lion,
    "Adafactor": torch.optim.Adafactor,
    "SGD": torch.optim.SGD,
}
_CPU_OFFLOAD_BUILDERS: dict[str, _Builder] = {
    "AdamW": _cpu_adamw,
    "Lion": DeepSpeedCPULion,
}

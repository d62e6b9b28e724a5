"""Build optimizers by name.

Parameters whose name matches one of `no_wd_kws` have no weight decay. Under CPU offload DeepSpeed's CPU optimizers
(compiled at first use) replace torch's, unless `zero_force_ds_cpu_optimizer` is false. State in bytes per parameter: 8
for AdamW and Adam, 4 for Lion and SGD with momentum, almost none for Adafactor. Adafactor needs weights in their own
shape, so it works only in fp32 without ZeRO (`training.config.contradictions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from lion_pytorch import Lion
from torch import Tensor, nn

from training.config.keys import TrainConfig
from training.config.optimization import Optimizer
from training.errors import ConfigError

PIECE = 2**24  # elements that Lion updates at a time

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def build_optimizer(
    config: TrainConfig, parameters: NamedParameters, shared_names: Sequence[Sequence[str]] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer of one stage.

    Args:
        shared_names: see `parameter_groups`.

    Raises:
        ConfigError: the optimizer does not accept `optimizer.params`.
    """
    compiled = config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer
    builders = _CPU_OFFLOAD_BUILDERS if compiled else _BUILDERS
    kind = config.optimizer.type
    ratio = config.lora.lr_ratio if config.lora else 1.0
    groups = parameter_groups(config.optimizer, parameters, shared_names, ratio)
    try:
        return builders[kind](groups, **config.optimizer.params)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {kind} does not accept them: {error}") from None


def parameter_groups(
    optimizer: Optimizer,
    parameters: NamedParameters,
    shared_names: Sequence[Sequence[str]] = (),
    lr_ratio: float = 1.0,
) -> list[dict[str, Any]]:
    """Split parameters into a group with weight decay and one without, and B of adapters off from both.

    Args:
        shared_names: of each weight that may be on several stages all names; each copy matches by any of them.
        lr_ratio: factor of B's learning rate (LoRA+, arXiv:2402.12354), which `LearningRate` applies.
    """
    found: dict[tuple[bool, bool], list[nn.Parameter]] = {}  # by whether exempt from weight decay, and faster
    for name, parameter in parameters:
        names = next((names for names in shared_names if name in names), (name,))
        matches = any(pattern.search(each) for pattern, each in product(optimizer.no_wd_kws, names))
        found.setdefault((matches, lr_ratio != 1 and name.endswith("lora_B")), []).append(parameter)
    return [
        {"params": members} | ({"weight_decay": 0.0} if exempt else {}) | ({"lr_ratio": lr_ratio} if faster else {})
        for (exempt, faster), members in sorted(found.items())
    ]


def _lion(groups: Any, **params: Any) -> torch.optim.Optimizer:
    lion = Lion(groups, **params)
    lion.update_fn = _in_pieces(lion.update_fn)
    optimizer: torch.optim.Optimizer = lion
    return optimizer


def _in_pieces(update: Callable[..., None]) -> Callable[..., None]:
    """Apply Lion's update to a piece of the weights at a time.

    The update makes two copies of its input. ZeRO joins a stage's weights into one vector, so the copies would take 8
    bytes per parameter: more than the second moment that Lion saves.
    """

    def in_pieces(weight: Tensor, gradient: Tensor, average: Tensor, *numbers: float) -> None:
        flat = (weight.view(-1), gradient.reshape(-1), average.view(-1))
        for piece in zip(*(tensor.split(PIECE) for tensor in flat), strict=True):
            update(*piece, *numbers)

    return in_pieces


def _cpu_adam(groups: Any, adamw_mode: bool, **params: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=adamw_mode, **params)
    optimizer.register_step_pre_hook(_forget_powers)
    return optimizer


def _forget_powers(optimizer: Any, *_: Any) -> None:
    """Make the kernel of DeepSpeed 0.19.8 compute the powers of the betas from the step number alone.

    It would multiply them from step to step, and so round differently than a resumed run. An empty update at step 0
    resets it.
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
    "AdamW": partial(_cpu_adam, adamw_mode=True),
    "Adam": partial(_cpu_adam, adamw_mode=False),
    "Lion": DeepSpeedCPULion,
}

"""Which layers recompute their activations: what `use_grad_ckpt` says, and what `auto` makes of it.

`auto` recomputes as few blocks of each stage as fit, by the planner's account of the device's memory
(`training.plan.memory`); the rest keep what they have and save the time. On a CPU it recomputes none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from models.block_options import BlockOptions
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.config.sections import EveryNth, Recompute
from training.topology import Topology

if TYPE_CHECKING:
    from training.plan.memory import MemoryModel


def block_options(config: TrainConfig, recompute: frozenset[int]) -> BlockOptions:
    """How the config wants blocks to be computed.

    Args:
        recompute: the layers that recompute.
    """
    return BlockOptions(recompute=recompute, offload=config.offload_activations, compile=config.compile)


def recomputed(setting: Recompute, n_blocks: int) -> frozenset[int]:
    """The layers of the blocks 1 .. `n_blocks` that recompute; with `auto` all that may have to."""
    if isinstance(setting, frozenset):
        return setting
    if not setting:
        return frozenset()
    step = setting.every if isinstance(setting, EveryNth) else 1
    return frozenset(range(step, n_blocks + 1, step))


def recomputed_on(
    config: TrainConfig, spec: ModelSpec, divided: Topology, stages: Iterable[int]
) -> list[frozenset[int]]:
    """The layers that recompute on these stages of the pipeline, on devices like this one."""
    if config.use_grad_ckpt != "auto":
        return [recomputed(config.use_grad_ckpt, spec.n_blocks) for _ in stages]

    from training.plan.devices import this_device
    from training.plan.parts import Basis
    from training.plan.plan import Plan
    from training.plan.workload import Workload

    plan = Plan(Basis(config, spec, Workload.assumed(config), this_device()), divided.parts)
    return [fewest_recomputed(plan.basis.memory, stage, plan.held[stage]) for stage in stages]


def recomputation_told(config: TrainConfig, spec: ModelSpec, divided: Topology) -> str:
    """What `use_grad_ckpt: auto` came to, for the log."""
    if not divided.parts:
        return "gradient checkpointing: auto, all blocks, as it is not known how ZeRO divides the memory"
    counts = [len(layers) for layers in recomputed_on(config, spec, divided, range(divided.stages))]
    if not any(counts):
        return "gradient checkpointing: auto, no block recomputes"
    return f"gradient checkpointing: auto, {', '.join(map(str, counts))} blocks of the stages recompute"


def fewest_recomputed(memory: MemoryModel, rank: int, stretches: Sequence[tuple[int, int]]) -> frozenset[int]:
    """The layers that a rank recomputes so that these stretches, [begin, end), fit: as few blocks as do."""
    if memory.device.memory is None:
        return frozenset()
    n_blocks = memory.spec.n_blocks
    blocks = [layer for begin, end in stretches for layer in range(begin, end) if 0 < layer <= n_blocks]

    def fits(count: int) -> bool:
        trial = memory.config.model_copy(update={"use_grad_ckpt": frozenset(blocks[:count])})
        return replace(memory, config=trial).fits(rank, stretches)

    return frozenset(blocks[: bisect_left(range(len(blocks)), True, key=fits)])  # all where that is not enough

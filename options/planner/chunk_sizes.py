"""Choose the tokens of a row's chunks (`row_chunk: auto`) with which a step is fastest, and fits.

Small chunks keep all stages of a pipeline busy, and few activations; large ones let kernels work on larger products,
and add up a model's gradients less often. Whole rows are taken where no chunks are faster.
"""

from __future__ import annotations

from models.spec import ModelSpec
from options.planner.inputs import Basis
from options.planner.micro_batch import ALIKE
from options.planner.plan import Plan, fitting_plan
from options.planner.row_chunks import can_chunk, sizes_of
from options.planner.search import Feed
from training.config.keys import TrainConfig
from training.metrics.devices import Device


def choose_chunk(
    config: TrainConfig, spec: ModelSpec, device: Device, feed: Feed, in_stages: bool
) -> tuple[int | None, str]:
    """Return the tokens of a chunk, None for whole rows, and a line for the log.

    Args:
        device: of each process.
        feed: the workload of a config.
    """
    if not can_chunk(config, spec):
        return None, "row chunk: auto, whole rows, as tokens meet in a way that no chunk can hand on"
    basis = Basis(config, spec, feed(config), device, in_stages=in_stages).in_chunks_of(None)
    sizes = sizes_of(basis.workload.longest)

    plans: dict[int | None, Plan] = {}
    for size in (None, *sizes):
        if plan := fitting_plan(basis.in_chunks_of(size)):
            plans[size] = plan
    if not plans:
        least = sizes[-1] if sizes else None
        return least, f"row chunk: auto, {in_words(least)}, as no size fits"

    fastest, whole = min(plan.seconds for plan in plans.values()), plans.get(None)
    chunk = next(size for size, plan in plans.items() if plan.seconds * ALIKE <= fastest)
    waits = f", bubble {plans[chunk].bubble:.1%}" if in_stages else ""
    if whole is None:
        return chunk, f"row chunk: auto, {in_words(chunk)}{waits}; whole rows do not fit"
    if chunk and in_stages:
        waits += f" in place of {whole.bubble:.1%}"
    return chunk, f"row chunk: auto, {in_words(chunk)}{waits}"


def in_words(chunk: int | None) -> str:
    """Say what passes the stages."""
    return f"{chunk:,} tokens" if chunk else "whole rows"

"""Choose the rows of a micro-batch (`train_micro_batch_size_per_gpu: auto`) with which a step is fastest, and fits.

Few rows keep all stages of a pipeline busy; many let kernels work on larger products, and add up a model's gradients
less often. The planner weighs both (`options.planner.costs`). On a device whose speed it does not know, such as a CPU,
blocks are timed with one row and with `TIMED_ROWS`, and how far the plan is from that changes evenly between them.
Embedding and head are timed with one row alone: they take the most time, and products as large gain least from rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from common.quantities import counted
from models.spec import ModelSpec
from options.planner.inputs import Basis, layer_kinds
from options.planner.measurements import Calibration
from options.planner.own_plan import own_planner
from options.planner.plan import fitting_plan
from options.planner.search import SIZES, Feed
from options.planner.timing import calibrate
from training.config.keys import TrainConfig
from training.metrics.devices import Device

ROWS = "train_micro_batch_size_per_gpu"
TIMED_ROWS, TIMED_LENGTH, ROUNDS = 4, 512, 2
NOTABLE = 1.1  # times the fastest: what a run is told that leaves the key out
ALIKE = 0.995  # of the time of a step, from which on fewer rows are taken: they take less memory


def choose_rows(
    config: TrainConfig,
    spec: ModelSpec,
    device: Device,
    feed: Feed,
    in_stages: bool,
    main_memory: int | None = None,
) -> tuple[int, str]:
    """Return the rows of a micro-batch, and a line for the log.

    Args:
        device: of each process.
        feed: the workload of a config.
        main_memory: bytes of a host, where they are known.
    """
    bases = [replace(basis, main_memory=main_memory) for basis in _possible(config, spec, device, feed, in_stages)]
    if not device.known and len(bases) > 1:
        bases = _timed(bases)
    seconds = _all_seconds(bases)
    if not seconds:
        return 1, "micro-batch: auto, 1 row, as no number fits"
    rows, least = _fastest(seconds), min(seconds)
    if rows == least:
        return rows, f"micro-batch: auto, {counted(rows, 'row')}"
    return rows, f"micro-batch: auto, {rows} rows, {seconds[least] / seconds[rows] - 1:.0%} faster than {least} by plan"


def advice(config: TrainConfig, spec: ModelSpec, device: Device, feed: Feed, in_stages: bool) -> str:
    """Return a line for who leaves the key out, where another number than its default is a tenth faster by plan."""
    seconds = _all_seconds(_possible(config, spec, device, feed, in_stages))
    default = seconds.get(config.micro_batch_size)
    if default is None or default < NOTABLE * min(seconds.values()):
        return ""
    rows, own = _fastest(seconds), counted(config.micro_batch_size, "row")
    gain = default / seconds[rows] - 1
    return f"micro-batch: {own} by default; {rows} are {gain:.0%} faster by plan: {ROWS}: auto chooses"


def _possible(config: TrainConfig, spec: ModelSpec, device: Device, feed: Feed, in_stages: bool) -> list[Basis]:
    """List the workload of each number of rows that the batch allows."""
    # As many rows as leave the schedule its micro-batches, and divide the global batch.
    replicas = config.model_topo.row_replicas
    enough = max(1, config.train_batch_size // (replicas * max(1, config.least_micro_batches)))
    candidates = [config.model_copy(update={ROWS: rows}) for rows in SIZES if rows <= enough]
    return [
        replace(Basis(candidate, spec, feed(candidate), device), in_stages=in_stages)
        for candidate in filter(_divides, candidates)
    ]


def _all_seconds(bases: list[Basis]) -> dict[int, float]:
    """Return the time of a step by rows, where it fits."""
    found = {_rows(each): _seconds(each) for each in bases}
    return {rows: time for rows, time in found.items() if time is not None}


def _fastest(seconds: dict[int, float]) -> int:
    fastest = min(seconds.values())
    return next(rows for rows, time in seconds.items() if time * ALIKE <= fastest)


def _divides(config: TrainConfig) -> bool:
    return not config.train_batch_size % (config.micro_batch_size * config.model_topo.row_replicas)


def _seconds(basis: Basis) -> float | None:
    """Return the time of a step; None where it does not fit."""
    if own := own_planner(basis.config):
        fastest = own.fastest(basis, basis.config.model_topo.stages)
        return fastest.seconds if fastest and fastest.fits else None
    plan = fitting_plan(basis)
    return plan.seconds if plan else None


def _timed(bases: list[Basis]) -> list[Basis]:
    """Time layers with one row and with several, and correct the plan's times of any number of rows by both."""
    timed = [basis for basis in bases if _rows(basis) <= TIMED_ROWS]
    few, many = timed[0], timed[-1]
    kinds = set(layer_kinds(few.spec))
    first, last = _calibrated(few, kinds), _calibrated(many, kinds - {0, few.spec.n_layers - 1})

    span = max(1, _rows(many) - _rows(few))
    corrected = []
    for basis in bases:
        share = min(1.0, (_rows(basis) - _rows(few)) / span)
        corrected.append(replace(basis, calibration=_between(first, last, share)))
    return corrected


def _rows(basis: Basis) -> int:
    return basis.config.micro_batch_size


def _calibrated(basis: Basis, kinds: set[int]) -> Calibration:
    length = min(math.ceil(basis.workload.length), TIMED_LENGTH)
    short = replace(basis.workload, length=length, attended=min(basis.workload.attended, length))
    return calibrate(basis.config, basis.spec, short, ROUNDS, kinds)


def _between(first: Calibration, last: Calibration, share: float) -> Calibration:
    def mixed(one: float, other: float) -> float:
        return one + share * (other - one)

    layers = dict(first.layers)
    for kind, (last_forward, last_backward) in last.layers.items():
        forward, backward = first.layers[kind]
        layers[kind] = mixed(forward, last_forward), mixed(backward, last_backward)
    return first.model_copy(update={"layers": layers})

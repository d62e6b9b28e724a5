"""Resolve `auto` (rows, chunks, parts, recomputation) on rank 0 and broadcast it; the planner's callback of a run.

`options.planner.partition` splits the layers. Of each stage as few blocks recompute as make it fit into the memory of
its own device. On a CPU none recomputes. Of devices of several kinds each stage gets what suits its own; a run whose
parts are another's hears what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from psutil import virtual_memory

from common.quantities import duration
from data.loader import Loader
from models.spec import ModelSpec
from options.planner.chunk_sizes import choose_chunk, in_words
from options.planner.inputs import Basis, Workload
from options.planner.kernels import choose_kernels
from options.planner.keys import PlannerKeys
from options.planner.measurements import MEASURED_FILE
from options.planner.micro_batch import ROWS, advice, choose_rows
from options.planner.own_plan import own_planner
from options.planner.plan import Plan
from options.planner.resources import check_resources, explain_out_of_memory
from options.planner.search import Feed, feed_of
from options.row_chunks.keys import KEY, ChunkKeys
from training.callbacks import Callback, Choice, JobView
from training.checkpoint.folder import CheckpointRecord
from training.config.keys import TrainConfig
from training.distributed.processes import agreed, gather
from training.metrics.devices import Device, mixed, this_device
from training.objective import ModelAndRecords
from training.topology import Division
from training.unplanned import split_as_configured


class Planning(Callback):
    """Resolve `auto` by the planner, check memory and disk, choose kernels, explain an out-of-memory error."""

    def __init__(self, task: ModelAndRecords) -> None:
        self._task = task

    def on_divide(self, job: JobView) -> Iterator[Choice]:
        task, device = self._task, mixed(gather(this_device()))
        if job.config.train_micro_batch_size_per_gpu == "auto":
            yield self._rows(job.config, job.progress.known)
        elif ROWS not in job.config.model_fields_set and torch.distributed.get_rank() == 0:
            inputs = task.spec, device, self._feed(), task.in_stages
            if line := advice(job.config, *inputs):
                yield Choice(report=[line])

        if isinstance(job.config, ChunkKeys) and job.config.row_chunk == "auto":
            yield self._chunk(job.config, job.progress.known)

        # The rows have taken effect, so the loader has them too.
        if leaves_open(job.config, task.spec, task.in_stages):
            yield Choice(division=divide(job.config, task.spec, task.in_stages, task.known_loader, job.progress.known))
        if device.each and task.in_stages and not own_planner(job.config) and torch.distributed.get_rank() == 0:
            yield Choice(report=loss_of_parts(job.config, task.spec, device, task.known_loader, job.division))

    def _rows(self, config: TrainConfig, known: CheckpointRecord | None) -> Choice:
        """Choose the rows of a micro-batch; a run that resumes keeps what it has."""
        rows = known.settings.get(ROWS) if known else None
        if rows is not None and config.train_batch_size % (rows * config.model_topo.row_replicas) == 0:
            return Choice({ROWS: rows})
        return self._chosen(ROWS, partial(choose_rows, main_memory=virtual_memory().total), config)

    def _chunk(self, config: TrainConfig, known: CheckpointRecord | None) -> Choice:
        """Choose the tokens of a row's chunks, likewise."""
        if known is None:
            return self._chosen(KEY, choose_chunk, config)
        chunk = known.settings.get(KEY)  # whole rows leave no number
        return Choice({KEY: chunk}, report=[f"row chunk: auto, {in_words(chunk)}, as at the checkpoint"])

    def _chosen(self, key: str, choose: Callable[..., tuple[int | None, str]], config: TrainConfig) -> Choice:
        """Ask the planner on rank 0."""
        task, chosen = self._task, None
        device = mixed(gather(this_device()))
        with agreed():
            if torch.distributed.get_rank() == 0:
                chosen = choose(config, task.spec, device, self._feed(), task.in_stages)
        value, line = next(each for each in gather(chosen) if each)
        return Choice({key: value}, report=[line])

    def _feed(self) -> Feed:
        """Say what a config's rows are."""
        return feed_of(self._task.dataset, self._task.spec) if self._task.known_loader else Workload.assumed

    def on_build(self, job: JobView) -> list[Choice]:
        check_resources(job.config, self._task.spec, job.layers, job.disk)
        kernels = choose_kernels(job.config, self._task.spec, self._task.known_loader)
        return [Choice({"compile": kernels.compile}, report=[*kernels.report, *job.config.objective.unplanned()])]

    def around(self, job: JobView) -> AbstractContextManager[None]:
        return explain_out_of_memory(job.config, self._task.spec, job.stage, self._task.known_loader)


def leaves_open(config: TrainConfig, spec: ModelSpec, in_stages: bool) -> bool:
    """Return whether the planner has to divide the model: without a pipeline there is nothing to choose."""
    own = own_planner(config) is not None
    return in_stages and (own or config.use_grad_ckpt == "auto" or config.parts_for(spec.n_layers) is None)


def divide(
    config: TrainConfig,
    spec: ModelSpec,
    in_stages: bool = True,
    loader: Loader | None = None,
    saved: CheckpointRecord | None = None,
) -> Division:
    """Divide a run's model. All ranks call it together.

    Args:
        in_stages: whether there is a pipeline; else each process has all layers (ZeRO).
        loader: of the data to plan for; every sample counts as `max_seq_len` tokens where absent.
        saved: record of the checkpoint to resume from.

    Raises:
        ConfigError: the config and the model do not fit each other.
    """
    if not leaves_open(config, spec, in_stages):
        return split_as_configured(config, spec, in_stages)
    device = mixed(gather(this_device()))
    chosen = gather(choose(config, spec, device, loader, saved) if torch.distributed.get_rank() == 0 else None)[0]
    assert chosen is not None
    return chosen


def choose(
    config: TrainConfig,
    spec: ModelSpec,
    device: Device,
    loader: Loader | None = None,
    saved: CheckpointRecord | None = None,
) -> Division:
    """Choose the division of a pipeline over such devices; see `divide`."""
    basis, report = Basis.of_run(config, spec, Workload.of(loader, config), device)
    if own := own_planner(config):
        division = own.divide(replace(basis, main_memory=virtual_memory().total))
        return replace(division, report=(*report, *division.report))
    if config.parts_for(spec.n_layers) is None:
        parts, reason = _resumed_parts(basis, saved)
        report.append(f"parts: auto, {reason}")
        basis = replace(basis, config=config.with_parts(parts))
    plan = Plan.make(basis)
    recompute = plan.basis.computed_again
    if config.use_grad_ckpt == "auto":
        counts = ", ".join(str(len(plan.basis.recomputed.intersection(stage.layers))) for stage in plan.stages)
        tower = " and those of the tower" if 0 in recompute else ""
        blocks = f"{counts} blocks of the stages{tower} recompute" if recompute else "no block recomputes"
        report.append(f"gradient checkpointing: auto, {blocks}")
    return Division(config.topology(plan.parts), recompute, tuple(report))


def loss_of_parts(
    config: TrainConfig, spec: ModelSpec, device: Device, loader: Loader | None, division: Division
) -> list[str]:
    """Say in a line how much faster other parts would be on devices of several kinds, if any are by 3 %."""
    from options.planner.feedback import better_parts

    basis, _ = Basis.of_run(config, spec, Workload.of(loader, config), device)
    plan = Plan(replace(basis, recompute=division.recompute), division.topology.parts)
    if not (found := better_parts(plan)):
        return []
    seconds = f", {duration(plan.seconds)} for {duration(plan.seconds / found[1])}" if plan.knows_seconds else ""
    longer = f"a step takes {found[1] - 1:.0%} longer by plan than with {found[0]}, those of parts: auto{seconds}"
    return [f"parts: {plan.parts} on {device.name}: {longer}"]


def _resumed_parts(basis: Basis, saved: CheckpointRecord | None) -> tuple[list[int], str]:
    """Return the parts of a run that resumes, else none, and why.

    Only on the same parts a run has the same bits; so measurements change them only where the config asks.
    """
    config, measured = basis.config, basis.measured
    if saved and len(saved.topology.parts) == config.chunks and "model_topo.parts" not in saved.settings:
        if isinstance(config, PlannerKeys) and config.rebalance and measured and len(measured.parts) == config.chunks:
            return measured.better or measured.parts, f"the best ones by measured steps ({MEASURED_FILE})"
        better = f"; rebalance: true takes {measured.better}" if measured and measured.better else ""
        return saved.topology.parts, f"as at the checkpoint{better}"
    if measured:
        return [], f"by measured costs, of the run's own steps ({MEASURED_FILE})"
    estimated = "estimated costs; --plan --calibrate measures them"
    return [], f"by {'measured costs, of --calibrate' if basis.calibration else estimated}"

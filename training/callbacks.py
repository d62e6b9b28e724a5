"""Hooks of a run: what a job calls before, during and after its steps.

Options of a run (planner, timeline, trackers, export ...) subclass `Callback` and override what they need. All ranks
have the same callbacks in the same order and call each hook together, so a hook may communicate.
`training.runs` lists those of a run; the core imports none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.job import Job
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics


class Callback:
    """Does nothing at each hook; the hooks are listed in the order in which a job calls them."""

    def on_divide(self, job: Job) -> None:
        """Set `job.division` where a key of it is `auto`; the inputs are read, the resume point is known."""

    def on_build(self, job: Job) -> None:
        """Check resources, choose kernels, add lines to `job.report`; the model is built next.

        Raises:
            RunRefused: on every rank, where the run cannot start.
        """

    def around(self, job: Job) -> AbstractContextManager[None]:
        """Wrap the building of the model and all steps."""
        return nullcontext()

    def on_start(self, run: Run) -> None:
        """Prepare for the first step; weights and optimizer are loaded."""

    def around_step(self, run: Run, step: int, batch: GlobalBatch) -> AbstractContextManager[None]:
        """Wrap forward, backward and update of a step."""
        return nullcontext()

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        """Use, or complete, the metrics of the step just done; set `run.restart` to end with the next checkpoint.

        Raises:
            RunRefused: on every rank, to end the run.
        """

    def on_evaluation(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Use the losses of an evaluation after `step`."""

    def on_end(self, run: Run, step: int) -> None:
        """Clean up after `step`, the last of this start, which need not be the last of the run."""

    def on_finish(self, job: Job, checkpoint: Path) -> None:
        """Use the run's last checkpoint; also called by a later start that finds nothing left to train."""


class Callbacks(Callback):
    """Calls several callbacks in their order."""

    def __init__(self, each: Sequence[Callback]) -> None:
        self._each = tuple(each)

    def on_divide(self, job: Job) -> None:
        for callback in self._each:
            callback.on_divide(job)

    def on_build(self, job: Job) -> None:
        for callback in self._each:
            callback.on_build(job)

    @contextmanager
    def around(self, job: Job) -> Iterator[None]:
        with ExitStack() as stack:
            for callback in self._each:
                stack.enter_context(callback.around(job))
            yield

    def on_start(self, run: Run) -> None:
        for callback in self._each:
            callback.on_start(run)

    @contextmanager
    def around_step(self, run: Run, step: int, batch: GlobalBatch) -> Iterator[None]:
        with ExitStack() as stack:
            for callback in self._each:
                stack.enter_context(callback.around_step(run, step, batch))
            yield

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        for callback in self._each:
            callback.on_step_end(run, metrics, batch)

    def on_evaluation(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        for callback in self._each:
            callback.on_evaluation(run, step, metrics)

    def on_end(self, run: Run, step: int) -> None:
        for callback in self._each:
            callback.on_end(run, step)

    def on_finish(self, job: Job, checkpoint: Path) -> None:
        for callback in self._each:
            callback.on_finish(job, checkpoint)

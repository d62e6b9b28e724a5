"""Hooks of a run: what a job calls before, during and after its steps.

Options of a run (planner, timeline, trackers, export ...) subclass `Callback` and override what they need. All ranks
have the same callbacks in the same order and call each hook together, so a hook may communicate.
`training.runs` lists those of a run; the core imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from common.log import Log
    from data.loader import GlobalBatch
    from training.config.keys import TrainConfig
    from training.distributed.disk import Disk
    from training.distributed.processes import ProcessInfo
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics
    from training.progress import Progress
    from training.topology import Division


class JobView(Protocol):
    """What a hook may read of a job before its first step and after its last; what a hook changes, it returns.

    Attributes:
        config: with what has been chosen so far in the place of `auto`.
        progress: where the run begins and ends.
        division: of the layers, as chosen so far.
        model_folder: where the weights to begin with come from; None for a script's layers.
        layers, stage: of this rank.
        mark: reports progress to the failure detector, as a text.
    """

    @property
    def config(self) -> TrainConfig: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def division(self) -> Division: ...
    @property
    def model_folder(self) -> Path | None: ...
    @property
    def layers(self) -> list[int]: ...
    @property
    def stage(self) -> int: ...
    @property
    def process(self) -> ProcessInfo: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def save_path(self) -> Path: ...
    @property
    def log(self) -> Log: ...
    @property
    def mark(self) -> Callable[[str], None]: ...


@dataclass(frozen=True)
class Choice:
    """What a hook chose before the model is built.

    Attributes:
        keys: of the config, with their values in the place of `auto`.
        division: of the layers; None leaves the one so far.
        report: lines for the log.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    division: Division | None = None
    report: Sequence[str] = ()


class Callback:
    """Does nothing at each hook; the hooks are listed in the order in which a job calls them."""

    def on_divide(self, job: JobView) -> Iterable[Choice] | None:
        """Choose keys that decide the batches, and the division; inputs are read, the resume point is known.

        Each choice takes effect before the next one is asked for: a generator sees its own in `job`.
        """

    def on_build(self, job: JobView) -> Iterable[Choice] | None:
        """Check resources, choose kernels, log what there is; the model is built next.

        Raises:
            RunRefused: on every rank, where the run cannot start.
        """

    def around(self, job: JobView) -> AbstractContextManager[None]:
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

    def on_finish(self, job: JobView, checkpoint: Path) -> None:
        """Use the run's last checkpoint; also called by a later start that finds nothing left to train."""


@contextmanager
def within(blocks: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Enter the blocks that callbacks wrap something in; the first one is the outermost."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield

"""The training loop: optimizer steps with checkpoints and evaluations between them, until the last one or a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import phases
from training.callbacks import Callback, within
from training.checkpoint.folder import step_folder
from training.errors import ConfigError, RunRefused
from training.metrics.peak_memory import peak_memory_by_stage
from training.metrics.step_metrics import StepMetrics

if TYPE_CHECKING:  # the parts of a run, which a job builds
    from data.loader import Loader
    from training.checkpoint.saving import Checkpointer
    from training.config.keys import TrainConfig
    from training.distributed.signals import StopRequest
    from training.engine.trainer import Trainer
    from training.evaluation import Evaluation
    from training.optimizer.lr_schedules import LearningRate
    from training.progress import Progress
    from training.topology import Topology


@dataclass
class Run:
    """The parts of a run. All ranks build it together.

    Attributes:
        config: with `auto` values resolved.
        mark: reports progress to the failure detector, as a text.
        origin: sample index -> source file and record, as text.
        restart: set by a callback: end with the next checkpoint, as the processes are to start over; the reason.
    """

    config: TrainConfig
    progress: Progress
    topology: Topology
    trainer: Trainer
    loader: Loader
    checkpointer: Checkpointer
    learning_rate: LearningRate
    callbacks: Sequence[Callback]
    stop: StopRequest
    mark: Callable[[str], None]
    origin: Callable[[int], str]
    evaluation: Evaluation | None = None
    restart: str = ""


def run_steps(run: Run) -> int:
    """Run the optimizer steps that are left; return the number of the last one done.

    Every rank walks through the same global batches. The state is saved where the config asks for it, when somebody
    asks the run to stop, and at the end.
    """
    try:
        done = _train(run, run.progress.done, run.progress.total_steps)
    except RunRefused:  # on every rank, so they can finish a save together
        with suppress(ConfigError):
            run.checkpointer.settle()
        raise
    for callback in run.callbacks:
        callback.on_end(run, done)
    return done


def _train(run: Run, done: int, total_steps: int) -> int:
    if done < total_steps and run.stop.agreed(False)[0]:  # the request came while the run was loading
        return done

    if run.progress.evaluate_first:
        loss = evaluate(run, done)
        if loss is None:
            return done
        # A checkpoint of another folder (`resume`) is not this run's to name.
        newest, taken_up = step_folder(Path(run.config.save_path), done), run.progress.checkpoint
        if taken_up and taken_up.resolve() == newest.resolve():
            run.checkpointer.note(done, loss)
    if done < total_steps:
        phases.enter("first step, which compiles the blocks" if run.config.compile is True else "first step")

    for step in range(done + 1, total_steps + 1):
        train_step(run, step)
        run.checkpointer.settle_if_written()
        stopping, due = run.stop.agreed(run.checkpointer.due(step))
        last = step == total_steps

        # Before the save: a run that is killed in between repeats the step, and the evaluation with it. One that has to
        # stop saves at once, and the next start evaluates; after the last step there may be no next one.
        loss = None
        if run.evaluation and run.evaluation.due(step, last) and (last or not stopping):
            loss = evaluate(run, step)
            stopping = stopping or loss is None
            run.checkpointer.settle()  # which may be the best so far

        if due or stopping or last or (loss is not None and run.checkpointer.is_best(loss)):
            with run.trainer.timings("checkpoint"):
                run.checkpointer.save(step, loss)
            run.mark(f"the checkpoint of step {step}")
        if stopping or last or run.restart:
            run.checkpointer.settle()
        if stopping or (run.restart and run.checkpointer.saved == step):
            return step
    return total_steps


def evaluate(run: Run, step: int) -> float | None:
    """Measure and report the evaluation loss; return None if asked to stop meanwhile, except after the last step."""
    assert run.evaluation is not None
    last = step == run.progress.total_steps
    losses = run.evaluation.run(run.trainer, run.mark, lambda: not last and run.stop.agreed(False)[0])
    if losses is None:
        return None
    for callback in run.callbacks:
        callback.on_evaluation(run, step, losses)
    return losses[run.evaluation.best_by]


def train_step(run: Run, step: int) -> None:
    """Train on the global batch of `step` and report it."""
    begin = time.monotonic()
    with run.trainer.timings("data"):
        batch = run.loader.batch(step - 1)
    lr = run.learning_rate.set(step)
    with within(callback.around_step(run, step, batch) for callback in run.callbacks):
        loss = run.trainer.train_step(run.loader, batch)
    seconds = time.monotonic() - begin
    norm = run.trainer.engine.get_global_grad_norm()
    run.mark(f"step {step}")
    metrics = StepMetrics(
        step=step,
        epoch=run.loader.epoch(step - 1) + 1,
        loss=loss,
        lr=lr,
        grad_norm=0.0 if norm is None else float(norm),
        samples=len(batch.samples),
        tokens=batch.tokens,
        supervised=batch.supervised,
        tokens_per_s=batch.tokens / seconds,
        seconds=seconds,
        mfu=None,
        times=run.trainer.timings.take(),
        peak_memory=peak_memory_by_stage(run.trainer.stage, run.topology.stages),
    )
    for callback in run.callbacks:
        callback.on_step_end(run, metrics, batch)

"""The training loop: one global batch after the other, with checkpoints, evaluation and a clean end in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from data.loader import Loader
from training.bad_steps import BadSteps
from training.checkpoint.saving import Checkpointer
from training.distributed.freed_memory import FreedMemory
from training.distributed.rank_monitor import RankMonitor
from training.distributed.signals import StopRequest
from training.engine.trainer import Trainer
from training.evaluation import Evaluation
from training.metrics.peak_memory import peak_memory_by_stage
from training.metrics.reporter import Reporter, StepMetrics
from training.optimizer.lr_schedules import LearningRate
from training.plan.feedback import Feedback
from training.profiler.session import Timeline


@dataclass
class Run:
    """What a loop works with.

    Attributes:
        utilization: see `training.metrics.utilization`.
        learning_rate: gives each step its own.
        done: how many steps are done already.
        evaluate_first: whether an evaluation after these steps is due.
        total_steps: of the whole run.
        stages: of the pipeline.
        timeline: records the steps of `profile_steps`, if any.
        feedback: measures the first steps of a pipeline.
    """

    trainer: Trainer
    loader: Loader
    checkpointer: Checkpointer
    reporter: Reporter
    stop: StopRequest
    monitor: RankMonitor
    bad_steps: BadSteps
    evaluation: Evaluation | None
    utilization: Callable[[Collection[int], int, float], float | None]
    learning_rate: LearningRate
    done: int
    evaluate_first: bool
    total_steps: int
    stages: int
    timeline: Timeline | None = None
    feedback: Feedback | None = None


def train(run: Run) -> int:
    """Run the optimizer steps that are left and report each; the number of the last one done.

    Every rank walks through the same global batches. The state is saved where the config asks for it, when somebody
    asks the run to stop, and at the end. A run that is to go on in better parts ends with its next checkpoint.
    """
    if run.evaluate_first:
        found = evaluate(run, run.done)
        if run.done:
            run.checkpointer.note(run.done, found)
    freed_memory = FreedMemory(kept=not torch.cuda.is_available())
    for step in range(run.done + 1, run.total_steps + 1):
        _step(run, step)
        if run.feedback:
            run.feedback.compare(run.trainer.stage, step)
        freed_memory.bound()
        if run.timeline and step == run.timeline.steps[1]:
            run.timeline.finish()
        stopping, due = run.stop.agreed(run.checkpointer.due(step))
        last = step == run.total_steps
        # Before the save: a run that is killed in between repeats the step, and the evaluation with it. One that has to
        # stop saves first, and the next start evaluates; after the last step there may be no next one.
        evaluating = run.evaluation and run.evaluation.due(step, last) and (last or not stopping)
        loss = evaluate(run, step) if evaluating else None
        if due or stopping or last or (loss is not None and run.checkpointer.is_best(loss)):
            with run.trainer.timings("checkpoint"):
                run.checkpointer.save(step, loss)
            run.monitor.mark(f"the checkpoint of step {step}")
        if stopping or (run.feedback and run.feedback.moves and run.checkpointer.saved == step):
            return step
    return run.total_steps


def evaluate(run: Run, step: int) -> float:
    """Measure and report the evaluation loss."""
    assert run.evaluation is not None
    found = run.evaluation.run(run.trainer, run.monitor)
    run.reporter.report_evaluation(step, found)
    return found["eval_loss"]


def _step(run: Run, step: int) -> None:
    begin = time.monotonic()
    with run.trainer.timings("data"):
        batch = run.loader.batch(step - 1)
    lr = run.learning_rate.set(step)
    with (
        run.timeline.step(step) if run.timeline else nullcontext(),
        run.feedback.step(run.trainer.engine, step, batch) if run.feedback else nullcontext(),
    ):
        loss = run.trainer.train_step(run.loader, batch)
    seconds = time.monotonic() - begin
    norm = run.trainer.engine.get_global_grad_norm()
    grad_norm = 0.0 if norm is None else float(norm)
    run.monitor.mark(f"step {step}")
    run.reporter.report(
        StepMetrics(
            step=step,
            epoch=run.loader.epoch(step - 1) + 1,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            samples=len(batch.lengths),
            tokens=batch.tokens,
            supervised=batch.supervised,
            tokens_per_s=batch.tokens / seconds,
            seconds=seconds,
            mfu=run.utilization(batch.lengths, batch.supervised, seconds),
            times=run.trainer.timings.take(),
            peak_memory=peak_memory_by_stage(run.trainer.stage, run.stages),
        )
    )
    run.bad_steps.check(run.loader, batch, step, loss, grad_norm)

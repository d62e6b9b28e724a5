"""The training loop: one global batch after the other, with checkpoints, evaluation and a clean end in between."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

from data.loader import Loader
from training.bad_steps import BadSteps
from training.checkpoint.saving import Checkpointer
from training.distributed.rank_monitor import RankMonitor
from training.distributed.signals import StopRequest
from training.engine.trainer import Trainer
from training.evaluation import Evaluation
from training.metrics.flops import Utilization
from training.metrics.peak_memory import peak_memory_by_stage
from training.metrics.reporter import Reporter, StepMetrics
from training.profiler.session import Timeline


@dataclass
class Run:
    """What a loop works with.

    Attributes:
        done: how many steps are done already.
        total_steps: of the whole run.
        stages: of the pipeline.
        timeline: records the steps of `profile_steps`, if any.
    """

    trainer: Trainer
    loader: Loader
    checkpointer: Checkpointer
    reporter: Reporter
    stop: StopRequest
    monitor: RankMonitor
    bad_steps: BadSteps
    evaluation: Evaluation | None
    utilization: Utilization
    done: int
    total_steps: int
    stages: int
    timeline: Timeline | None = None


def train(run: Run) -> int:
    """Run the optimizer steps that are left and report each; the number of the last one done.

    Every rank walks through the same global batches. The state is saved where the config asks for it, when somebody
    asks the run to stop, and at the end.
    """
    if run.evaluation and run.evaluation.at_start and not run.done:
        evaluate(run, 0)
    for step in range(run.done + 1, run.total_steps + 1):
        _step(run, step)
        if run.timeline and step == run.timeline.last:
            run.timeline.finish()
        stopping, due = run.stop.agreed(run.checkpointer.due(step))
        last = step == run.total_steps
        # Before the save: a run that is killed in between repeats the step, and the evaluation with it.
        found = evaluate(run, step) if run.evaluation and run.evaluation.due(step, last) and not stopping else None
        best = found is not None and run.checkpointer.is_best(found)
        if due or best or stopping or last:
            with run.trainer.timings("checkpoint"):
                run.checkpointer.save(step, found if best else None)
            run.monitor.mark(f"the checkpoint of step {step}")
        if stopping:
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
    lr = run.trainer.engine.get_lr()[0]
    with run.timeline.step(step, batch) if run.timeline else nullcontext():
        loss = run.trainer.train_step(run.loader, batch)
    seconds = time.monotonic() - begin
    grad_norm = float(run.trainer.engine.get_global_grad_norm() or 0.0)
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
    run.bad_steps.check(run.trainer, run.loader, batch, step, loss, grad_norm)

"""The training loop: one global batch after the other through the pipeline."""

from __future__ import annotations

import time
from pathlib import Path

from deepspeed.runtime.pipe.engine import PipelineEngine

from data.loader import GlobalBatch, Loader
from training.metrics import Reporter, StepMetrics


def train(engine: PipelineEngine, loader: Loader, total_steps: int, folder: Path, steps_per_print: int) -> None:
    """Run `total_steps` optimizer steps and report each.

    Every rank walks through the same global batches; the first and last stages turn their replica's part into tensors.
    """
    with Reporter(folder, total_steps, engine.global_rank == 0, steps_per_print) as reporter:
        for step in range(total_steps):
            begin = time.monotonic()
            batch = loader.batch(step)
            lr = engine.get_lr()[0]
            loss = train_step(engine, loader, batch)
            seconds = time.monotonic() - begin
            reporter.report(
                StepMetrics(
                    step=step + 1,
                    epoch=step // loader.steps_per_epoch + 1,
                    loss=loss,
                    lr=lr,
                    grad_norm=float(engine.get_global_grad_norm() or 0.0),
                    samples=sum(len(group) for replica in batch.micro_batches for group in replica),
                    tokens=batch.tokens,
                    supervised=batch.supervised,
                    tokens_per_s=batch.tokens / seconds,
                    seconds=seconds,
                )
            )


def train_step(engine: PipelineEngine, loader: Loader, batch: GlobalBatch) -> float:
    """One optimizer step on a global batch; its loss, the mean over the batch's supervised tokens."""
    replica = engine.grid.get_data_parallel_id()
    # An epoch's last batch may have fewer micro-batches; DeepSpeed averages over as many as it is told.
    engine.set_train_batch_size(batch.n_micro_batches * loader.micro_batch_size * loader.replicas)
    return float(engine.train_batch(loader.tensors(batch, replica)))

"""Trainers whose micro-batches go to the engine in chunks of their rows, forward in order and back from the last."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain, pairwise
from pathlib import Path

import torch
from typing_extensions import Self

from data.collation import Carried, Collation
from data.loader import GlobalBatch, Loader, MicroBatch
from models.attention.chunks import chunks_of
from models.spec import ModelSpec
from options.row_chunks.cuts import RowCuts, cuts_of
from options.row_chunks.engine import ChunkEngine
from training.config.keys import TrainConfig
from training.engine.pipeline import PipelineTrainer
from training.engine.trainer import Sent, Trainer
from training.engine.zero import ZeroTrainer
from training.topology import Division


class ChunkTrainer(Trainer):
    """What both ways to spread a model have in common: a unit is a chunk of a micro-batch's rows."""

    _cut: RowCuts | None  # None: the planner chose whole rows
    _cuts: list[list[int]]  # of the coming micro-batches

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> Self:
        trainer = super().build(config, spec, folder, division)
        assert isinstance(trainer, cls)
        trainer._cut = cuts_of(config, spec)
        return trainer

    def micro_batches(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        """Yield this rank's units on the device."""
        layouts = loader.layouts(batch, self.row_replica)
        self._cuts = [self._cut(*layout) if self._cut else [layout[1]] for layout in layouts]
        units = super().micro_batches(loader, batch)

        documents = self.documents(loader, batch)
        for positions in self.engine.module.positions:
            of_units = ([each] * len(cuts) for each, cuts in zip(documents, self._cuts, strict=True))
            # Each stage has a memory of its own of the rows on their way.
            positions.expect(chain(*of_units), chain(*map(chunks_of, self._cuts)))
        return units

    def on_host(self, loader: Loader, batch: GlobalBatch) -> Iterator[MicroBatch]:
        for micro_batch, cuts in zip(super().on_host(loader, batch), self._cuts, strict=True):
            yield from _units(micro_batch, cuts, loader.collation)


def _units(micro_batch: MicroBatch, cuts: list[int], collation: Collation) -> Iterator[MicroBatch]:
    """Cut a micro-batch: own tokens with the label behind them, and all positions."""
    if len(cuts) == 1:
        yield micro_batch
        return
    (input_ids, position_ids, *to_first), (labels, scale, share, *to_last) = micro_batch
    for begin, end in pairwise(accumulate(cuts, initial=0)):
        own = slice(begin, end)
        carried = collation.part(Carried(tuple(to_first), tuple(to_last)), labels, own, 1)
        # What is no sum over tokens counts with the last chunk, when all have passed.
        counts = share if end == labels.shape[1] else torch.zeros_like(share)
        # A memory of its own: by it layers know that another chunk has come.
        tokens = input_ids[:, own], position_ids.clone()
        yield (*tokens, *carried.first), (labels[:, begin : end + 1], scale, counts, *carried.last)


class ChunkPipelineTrainer(ChunkTrainer, PipelineTrainer):
    """A stage of the pipeline."""

    stage_engine = ChunkEngine
    engine: ChunkEngine

    def micro_batches(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        units = super().micro_batches(loader, batch)
        self.engine.expect_chunks(self._cuts, loader.shapes(batch, self.row_replica))
        return units


class ChunkZeroTrainer(ChunkTrainer, ZeroTrainer):
    """A replica of the model."""

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        losses = []
        units = self.timings.each("data", self.micro_batches(loader, batch))
        for number, cuts in enumerate(self._cuts, start=1):
            with self.timings("forward_backward"):
                of_row = [self.engine(*next(units)) for _ in cuts]
                losses.append(torch.stack(of_row).detach().sum())
                while of_row:
                    loss = of_row.pop()
                    self.engine.set_gradient_accumulation_boundary(number == len(self._cuts) and not of_row)
                    self.engine.backward(loss)
        self.take_step(self.engine.step)
        return self._mean(losses)

    @torch.no_grad()
    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        self.engine.eval()
        units = self.micro_batches(loader, batch)
        losses = []
        for cuts in self._cuts:
            losses.append(torch.stack([self.engine(*next(units)) for _ in cuts]).sum())
        self.engine.train()
        return self._mean(losses)

"""Whole jobs with an objective that the core has never heard of (see `jobs.py`, whose cases these are).

`Slanted` sends a tensor to the first stage, whose embedding adds it to the words, and one to the last, whose loss
counts each trained token as often as that says, and measures how often that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.collation import Carried, Collation
from data.loader import GlobalBatch, Loader
from data.sample_set import SampleSet
from models.layers import Activations, Embedding, Head
from models.loss.interface import MeasuredLoss, supervised_positions
from models.loss.lean import linear_cross_entropy
from models.loss.micro_batch import for_projection, trained_rows
from models.spec import ModelSpec
from options import RunConfig
from tests.workers import jobs
from training.callbacks import Callback
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.measures import Measures
from training.objective import Formula, ModelAndRecords, Objective
from training.option import Option

SHIFT, SLOPE = 0.02, 0.25  # a place


def shifts(places: Tensor) -> Tensor:
    """What is added to the embedding of tokens at these places of their documents, [...] fp32."""
    return SHIFT * places.clamp(min=0).float()


def counts(places: Tensor, slope: float = SLOPE) -> Tensor:
    """How often the prediction of tokens counts."""
    return 1 + slope * places.clamp(min=0).float()


class SlantedCollation(Collation):
    """Sends both, [B, S] fp32."""

    def __init__(self, data: SampleSet, slope: float) -> None:
        super().__init__(data)
        self._slope = slope

    def carried(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Carried]:
        for rows in batch.micro_batches[replica]:
            height, width = loader.shape(rows)
            places = torch.zeros(height, width, dtype=torch.int64)
            for index, row in enumerate(rows):
                lengths = [length for (length,) in self.documents(row)]
                own = torch.cat([torch.arange(length) for length in lengths])
                places[index, : len(own)] = own
            yield Carried((shifts(places),), (counts(places, self._slope),))

    def part(self, carried: Carried, labels: Tensor, columns: slice, ranks: int) -> Carried:
        return Carried((carried.first[0][:, columns],), (carried.last[0][:, columns],))


class ShiftedEmbedding(Embedding):
    """Takes what was sent to it; a plan sends nothing."""

    def forward(self, inputs: Activations) -> Activations:
        input_ids, position_ids, *sent = inputs
        hidden, *others = super().forward((input_ids, position_ids))
        for shift in sent:
            hidden = hidden + shift[:, :, None]
        return hidden, *others


class SlantedLoss(MeasuredLoss):
    measures = ("count",)

    def __call__(self, head: Head, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        ids, scale, _, times, *known = labels
        positions = known[0] if known else supervised_positions(ids, activations[0].shape[1])
        hidden, targets = trained_rows(activations[0], ids, positions)
        own = times.flatten().index_select(0, positions)
        self.count(own[:, None])
        hidden, projection = for_projection(hidden, head)
        options = head.cap, 0.0, head.ranks, head.words
        return linear_cross_entropy(hidden, projection, targets, *options, weigh=lambda _: own) * scale


class Slanted(Objective):
    def __init__(self, config: TrainConfig, slope: float) -> None:
        super().__init__(config)
        self._slope = slope

    def collation(self, data: SampleSet) -> Collation:
        return SlantedCollation(data, self._slope)

    def model(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, family=replace(spec.family, embeds=ShiftedEmbedding), _shapes={})

    def loss(self, router_loss_weight: float) -> SlantedLoss:
        return SlantedLoss()

    def callbacks(self, task: ModelAndRecords) -> list[Callback]:
        return [Measures()]

    def formula(self) -> Formula:
        raise ConfigError("--prove: a slanted loss has no formula here")


class SlantedKeys(TrainConfig):
    """A run that may train a slanted loss."""

    slope: float | None = None
    """How often a token counts, by its place."""

    @property
    def objective(self) -> Objective:
        return super().objective if self.slope is None else Slanted(self, self.slope)


class WithSlanted(SlantedKeys, RunConfig):
    """A whole run, and a slanted loss."""

    options = (*RunConfig.options, Option(SlantedKeys, before="freeze", objective_key="slope"))


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    jobs.run_case(case, WithSlanted.model_validate(config.dump() | {"slope": SLOPE}), folder)

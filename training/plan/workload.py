"""What a plan feeds a run with: the micro-batches of a step, measured of the records where they are known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from statistics import mean

from data.loader import Loader
from training.config.keys import TrainConfig

STEPS = 16  # of the first epoch, which stand for the others


@dataclass(frozen=True)
class Workload:
    """The micro-batches of a step.

    Attributes:
        rows: in a micro-batch.
        length: tokens in a row, padding included; the mean.
        longest: the most tokens in a row.
        attended: how many tokens the document of a token has, in the mean: what the quadratic term goes with.
        supervised: the share of tokens that bear loss.
        micro_batches: of one replica in a step.
        tokens: in a step, without padding, over all replicas.
        steps: of the whole run; None where the data are not known.
        source: where this is known from, in words.
    """

    rows: int
    length: float
    longest: int
    attended: float
    supervised: float
    micro_batches: int
    tokens: float
    steps: int | None
    source: str

    @classmethod
    def of(cls, loader: Loader | None, config: TrainConfig) -> Workload:
        """Measured where there is a loader, else assumed."""
        return cls.measured(loader, config) if loader else cls.assumed(config)

    @classmethod
    def assumed(cls, config: TrainConfig) -> Workload:
        """As if every sample had `max_seq_len` tokens, all supervised."""
        length, (rows, micro_batches) = config.max_seq_len, divided(config.train_batch_size, config)
        return cls(
            rows=rows,
            length=length,
            longest=length,
            attended=length,
            supervised=1.0,
            micro_batches=micro_batches,
            tokens=config.train_batch_size * length,
            steps=config.max_steps,
            source=f"assumed: every sample has max_seq_len, {length}, tokens, all supervised",
        )

    @classmethod
    def measured(cls, loader: Loader, config: TrainConfig) -> Workload:
        """As the first global batches are."""
        batches = [loader.batch(step) for step in range(min(STEPS, loader.steps_per_epoch))]
        lengths = [length for batch in batches for length in batch.lengths]
        replicas = range(loader.replicas)
        shapes = [shape for batch in batches for replica in replicas for shape in loader.shapes(batch, replica)]
        padded, rows = sum(map(prod, shapes)), max(rows for rows, _ in shapes)  # smaller where the schedule needs more
        return cls(
            rows=rows,
            length=padded / (rows * len(shapes)),
            longest=max(int(loader.data.lengths.max()), *(length for _, length in shapes)),  # which may come later
            attended=sum(length**2 for length in lengths) / sum(lengths),
            supervised=sum(batch.supervised for batch in batches) / padded,
            micro_batches=round(mean(batch.n_micro_batches for batch in batches)),
            tokens=mean(batch.tokens for batch in batches),
            steps=config.max_steps or config.n_epoches * loader.steps_per_epoch,
            source=f"the first {len(batches)} batches of data_path",
        )

    def shared(self, sequence: int) -> Workload:
        """What one of so many processes has that share their rows: a part of each row's tokens."""
        return replace(self, length=self.length / sequence, longest=ceil(self.longest / sequence))

    @property
    def micro_tokens(self) -> float:
        """Tokens in a micro-batch, padding included."""
        return self.rows * self.length


def divided(rows: int, config: TrainConfig) -> tuple[int, int]:
    """Rows in a micro-batch and micro-batches of a replica, of a step's rows: smaller where the schedule needs more."""
    size, least = config.train_micro_batch_size_per_gpu, config.least_micro_batches
    replicas = config.model_topo.row_replicas
    micro_batches = max(1, ceil(rows / (size * replicas)))
    if micro_batches < least <= rows // replicas:
        return ceil(rows / (least * replicas)), least
    return size, micro_batches

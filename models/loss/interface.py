"""What calls a micro-batch's loss, and the metrics, know of it; `models.loss.micro_batch` is the usual one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import Activations, Head

IGNORED = -100  # the label of a token without loss, as in transformers and torch

# With what it adds up and by which weights; arguments as of `MeasuredLoss`.
MicroBatchLoss = Callable[[Head, Activations, tuple[Tensor, ...]], Tensor]


class MeasuredLoss(ABC):
    """A loss that counts something besides, for the metrics, in the place of `micro_batch_loss`.

    Attributes:
        measures: names of what is counted of each sample, document or token.
    """

    measures: tuple[str, ...]
    _totals: Tensor | None = None

    @abstractmethod
    def __call__(self, head: Head, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute a micro-batch's part of the global loss, in fp32.

        Args:
            activations: as for `micro_batch_loss`.
            labels: as there, with what the objective sends besides (`data.collation`) behind `share`.
        """

    def count(self, counted: Tensor) -> None:
        """Add [n, measures], the numbers of n samples, documents or tokens."""
        counted = counted.detach().double()
        found = torch.cat([counted.new_tensor([len(counted)]), counted.sum(dim=0)])
        self._totals = found if self._totals is None else self._totals + found

    def take(self) -> Tensor:
        """Return and reset how many were counted and the sums over them, [1 + measures] fp64; 0 without any."""
        totals, self._totals = self._totals, None
        return torch.zeros(1 + len(self.measures), dtype=torch.float64) if totals is None else totals.cpu()

    def means(self, found: dict[str, float]) -> dict[str, float]:
        """Complete the means of the measures over all ranks."""
        return found


def supervised_positions(labels: Tensor, length: int) -> Tensor:
    """Find the tokens that predict a supervised one: [T] int64; the host waits for a GPU.

    Args:
        labels: [B, S], or [B, S + 1] where a row goes on elsewhere.
        length: S, tokens in a row.
    """
    return (shifted(labels, length) != IGNORED).nonzero().squeeze(-1)


def shifted(labels: Tensor, length: int) -> Tensor:
    """Shift labels: what each flattened token has to predict."""
    return F.pad(labels[:, 1:], (0, 1 + length - labels.shape[1]), value=IGNORED).flatten()

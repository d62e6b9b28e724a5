"""With whom a process shares its rows, and with whom its layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Peers:
    """Neighbouring processes that share something.

    Attributes:
        size: how many they are.
        rank: which of them this one is, from 0.
        group: by which they reach each other; None where there is only one.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None

    def part(self, count: int) -> slice:
        """Which of `count` things are this process's: as even as can be, the larger parts first."""
        each, more = divmod(count, self.size)
        begin = self.rank * each + min(self.rank, more)
        return slice(begin, begin + each + (self.rank < more))


ALONE = Peers()


@dataclass(frozen=True)
class Sharing:
    """Both kinds of peers of a process.

    Attributes:
        sequence: who have the other tokens of the same rows (`models.parallel.sequence`).
        tensor: who have the other parts of the same layers (`models.parallel.tensor`).
    """

    sequence: Peers = ALONE
    tensor: Peers = ALONE


NONE_SHARED = Sharing()

"""The rows of a proof: what was compared, the largest difference, the bound, and where.

A bound is a number of roundings. fp32 rounds by half of 2^-23, and sums of a hundred terms in another order differ by
some tens of that; gradients of weights that nearly cancel by more: 2^-23 x 256. In bf16 and fp16 each value between two
operations is rounded while sums are in fp32, so a gradient carries the roundings of the layers it passed: 2^-7 x 8 and
2^-10 x 8. Differences are relative and of a whole tensor: the norm of the difference over the norm of the reference.
Weights, which the optimizer keeps in fp32 whatever the precision, are compared by their updates. Where the same bits
are due, the bound is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDINGS = {torch.float32: 256, torch.bfloat16: 8, torch.float16: 8}
UPDATE = 1e-4  # of fp32 arithmetic on numbers of all sizes: 2^-23 x 1000
ROUNDED = 1e-3  # the share of a weight that counts as a part of its update, for the digits that a weight cannot hold


def bound_of(dtype: torch.dtype) -> float:
    """Of losses, norms and gradients of a run in `dtype`."""
    return ROUNDINGS[dtype] * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Difference:
    """How far two things are apart that should be one; infinite where one is absent, or no number.

    Attributes:
        step: of the run.
        name: of a weight, `<layer>.<name>`, or empty.
    """

    value: float
    step: int
    name: str = ""


@dataclass(frozen=True)
class Row:
    """A property with the largest difference of all that were compared.

    Attributes:
        count: how many comparisons there were; a property of none is not proved.
        where: of the largest difference, for a person.
    """

    property: str
    count: int
    largest: float
    bound: float
    where: str

    @property
    def holds(self) -> bool:
        return self.count > 0 and self.largest <= self.bound

    @property
    def found(self) -> str:
        """The largest difference, for a person."""
        return f"{self.largest:.1e}" if self.largest else "0"

    @property
    def limit(self) -> str:
        """The bound, for a person."""
        return f"{self.bound:.1e}" if self.bound else "0"

    @classmethod
    def of(cls, what: str, differences: Iterable[Difference], bound: float, place: Callable[[str], str]) -> Row:
        """
        Args:
            place: the layer and the stage of a weight, for a person.
        """
        found = list(differences)
        worst = max(found, key=lambda each: each.value, default=Difference(math.inf, 0))
        where = f"step {worst.step}" + (f", {place(worst.name)}" if worst.name else "")
        return cls(what, len(found), worst.value, bound, where if found else "")


def number(step: int, found: float | None, expected: float) -> Difference:
    """Of two numbers; relative."""
    value = abs(found - expected) / abs(expected) if found is not None else math.nan
    return Difference(value if math.isfinite(value) else math.inf, step)


def tensors(
    step: int,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tied: tuple[str, str] | None,
    before: Mapping[str, Tensor] | None = None,
) -> list[Difference]:
    """Of each tensor by name.

    Args:
        tied: the names of the weight that is both embedding and head: of several stages each end holds all of it.
        before: the weights before the update, where weights are compared.
    """
    made = []
    for name in {**expected, **found}:
        twin = tied[0] if tied and name == tied[1] and name not in expected else name
        if name not in found or twin not in expected:
            made.append(Difference(math.inf, step, name))
            continue
        scale = expected[twin].norm()
        if before is not None:
            scale = (expected[twin] - before[twin]).norm() + ROUNDED * before[twin].norm()
        value = ((found[name] - expected[twin]).norm() / scale).item()
        made.append(Difference(value if math.isfinite(value) else math.inf, step, name))
    return made


def flat(step: int, gradients: Mapping[str, Tensor]) -> list[Difference]:
    """1 for each gradient that is zero, constant or not finite, which no comparison could tell from none; else 0."""
    return [
        Difference(float(not gradient.isfinite().all() or bool((gradient == gradient.flatten()[0]).all())), step, name)
        for name, gradient in gradients.items()
    ]


def same_bits(step: int, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[Difference]:
    """The largest difference of each tensor's numbers."""
    return [
        Difference(_apart(found.get(name), expected.get(name)), step, name) for name in {**expected, **found}
    ]


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    value = (one.float() - other.float()).abs().max().item()
    return value if math.isfinite(value) and value else math.inf

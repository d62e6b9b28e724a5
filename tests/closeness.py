"""How far apart two computations of the same numbers may be: a number of roundings of the largest one.

Processors, and libraries for them, add up in another order. What a sum is rounded by depends on the size of its terms
and not on its own: where terms cancel, an entry near zero is as far off as its largest neighbour. So a difference is
held against the largest number of its tensor. The bounds leave room of at least four over what was seen with AVX-512,
AVX2 and neither, with the kernels of torch, oneDNN and MKL for each, and a fault of a thousandth is found in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Numbers = Tensor | float | Sequence["Numbers"] | Mapping[str, "Numbers"]


class Roundings(NamedTuple):
    """
    Attributes:
        tensors: activations, gradients and weights; seen were 150 (the query biases of a tiny llama) and 3.7 in bf16.
        norms: of all gradients; seen were 1 and 0.7.
        means: over the tokens of a batch, in which most of it goes out; seen were 1 and 0.02.
    """

    tensors: float
    norms: float
    means: float


ROUNDINGS = {torch.float32: Roundings(1024, 64, 64), torch.bfloat16: Roundings(16, 4, 0.25)}


def bound(dtype: torch.dtype = torch.float32, kind: str = "tensors") -> float:
    """The largest difference that is rounding, as a share of the largest number."""
    return float(getattr(ROUNDINGS[dtype], kind)) * torch.finfo(dtype).eps


def assert_near(
    found: Numbers, expected: Numbers, dtype: torch.dtype = torch.float32, kind: str = "tensors", name: str = ""
) -> None:
    """Compare numbers that differ by rounding alone; in mappings and sequences each tensor by its own size.

    Args:
        dtype: in which they were computed.
        kind: one of `Roundings`.
    """
    if isinstance(expected, Mapping):
        assert isinstance(found, Mapping) and found.keys() == expected.keys()
        for key, each in expected.items():
            assert_near(found[key], each, dtype, kind, key)
    elif isinstance(expected, Sequence) and isinstance(expected[0], Tensor):
        assert isinstance(found, Sequence) and len(found) == len(expected)
        for number, each in enumerate(expected):
            assert_near(found[number], each, dtype, kind, str(number))
    else:
        pair = [torch.as_tensor(each).detach().double().cpu() for each in (found, expected)]
        most = bound(dtype, kind) * float(pair[1].abs().max())
        torch.testing.assert_close(*pair, rtol=0, atol=most, msg=lambda text: f"{name}: {text}" if name else text)

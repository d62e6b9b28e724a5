"""Parts of a weight, and what differently cut parts of it have in common."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from models.parallel import shard
from models.parallel.groups import RankGroup
from models.parallel.shard import Shard, in_common

SHAPE = (4, 6, 10)


def parts(size: int, side: int, above: int) -> list[Shard | None]:
    """How so many processes share a weight, in which `above` matrices lie above each other; None for the whole one."""
    if size == 1:
        return [None]
    width = SHAPE[side] // above
    shares = [RankGroup(size, rank).part(width) for rank in range(size)]
    tops = range(0, SHAPE[side], width)
    return [Shard(SHAPE, side, tuple(range(top + part.start, top + part.stop) for top in tops)) for part in shares]


def of(part: Shard | None, whole: Tensor) -> Tensor:
    return (part.of(whole) if part else whole).flatten()


ways = some.tuples(some.integers(1, 3), some.integers(0, 2), some.sampled_from([1, 2]))


@given(ways, ways, some.integers(1, 3), some.integers(1, 3), some.sampled_from([7, 2**20]))
def test_all_of_a_weight_finds_its_place(
    now: tuple[int, int, int], then: tuple[int, int, int], replicas: int, ranges: int, chunk: int
) -> None:
    """What processes hold now, each in as many ranges as it has replicas, comes once from what was held then."""
    whole = torch.arange(4 * 6 * 10)
    whole = whole.view(SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "CHUNK", chunk)
        for part in parts(*now):
            wanted = of(part, whole)
            found, times = torch.full_like(wanted, -1), Counter[int]()
            for source in parts(*then):
                held = of(source, whole)
                for mine in range(replicas):
                    for its in range(ranges):
                        one, other = (RankGroup(*each) for each in ((replicas, mine), (ranges, its)))
                        here, there = one.part(len(wanted)), other.part(len(held))
                        pair = (
                            (part, here.start, here.stop - here.start),
                            (source, there.start, there.stop - there.start),
                        )
                        for place, origin in in_common(*pair):
                            found[place] = held[origin]
                            times.update(place.tolist())
            assert torch.equal(found, wanted)
            assert set(times.values()) <= {1}


@given(ways)
def test_parts_make_the_whole(way: tuple[int, int, int]) -> None:
    whole, joined = torch.rand(SHAPE), torch.zeros(SHAPE)
    for part in parts(*way):
        if part is None:
            return
        assert part.of(whole).shape == part.part_shape
        part.put(part.of(whole), joined)
    assert torch.equal(joined, whole)

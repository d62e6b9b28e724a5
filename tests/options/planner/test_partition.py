"""The best division of layers against every division there is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from options.planner.partition import LayerRange, best_split, held_layers


def divisions(layers: int, stages: int) -> Iterator[list[int]]:
    """Every way to give each stage at least one layer."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True)]


def judge(parts: list[int], costs: list[list[int]]) -> tuple[int, int]:
    """The slowest rank, then how uneven the stages are."""
    stages = [
        [sum(of_rank[begin:end]) for begin, end in ranges]
        for of_rank, ranges in zip(costs, held_layers(parts, len(costs)), strict=True)
    ]
    return max(map(sum, stages)), sum(stage**2 for of_rank in stages for stage in of_rank)


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("v_schedule", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_division_is_better(seed: int, v_schedule: bool, unequal: bool) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 3)
    layers = draw.randint(2 * ranks, 11)
    costs = ranks * [[draw.choice([0, 1, 1, 1, 3, 8]) * draw.choice([1, 10]) for _ in range(layers)]]
    if unequal:
        costs = [[cost * draw.randint(1, 4) for cost in of_rank] for of_rank in costs]
    bytes_ = [draw.randint(1, 9) for _ in range(layers)]
    room = [draw.randint(8, 40) for _ in range(ranks)]

    def fits(rank: int, ranges: tuple[LayerRange, ...]) -> bool:
        return sum(sum(bytes_[begin:end]) for begin, end in ranges) <= room[rank]

    allowed = [
        parts
        for parts in divisions(layers, ranks * (2 if v_schedule else 1))
        if all(fits(rank, ranges) for rank, ranges in enumerate(held_layers(parts, ranks)))
    ]
    found = best_split(costs, fits, v_schedule)
    if not allowed:
        assert found is None
    else:
        assert found in allowed
        assert judge(found, costs) == min(judge(parts, costs) for parts in allowed)


@pytest.mark.parametrize("v_schedule", [False, True])
def test_equal_layers_are_divided_evenly(v_schedule: bool) -> None:
    assert best_split(4 * [[7] * 24], lambda rank, ranges: True, v_schedule) == ([3] * 8 if v_schedule else [6] * 4)


@pytest.mark.parametrize(("layers", "ranks", "v_schedule"), [(3, 4, False), (7, 4, True)])
def test_fewer_layers_than_stages(layers: int, ranks: int, v_schedule: bool) -> None:
    assert best_split(ranks * [[1] * layers], lambda rank, ranges: True, v_schedule) is None


def test_a_rank_without_the_memory_for_an_even_share_gets_less() -> None:
    assert best_split(2 * [[1] * 8], lambda rank, ranges: rank == 1 or ranges[0][1] <= 3) == [3, 5]

"""Plans of runs with layers ahead, which make the last stage heavier."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from options.planner.costs import layer_times
from options.planner.memory import MemoryModel
from options.planner.plan import best_parts
from tests.options.planner.helpers import basis_of, config_of, llama
from training.trained import with_trained

NEW: dict[str, Any] = {"mtp": {"init": "copy"}}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The same run of four stages without and with a layer ahead."""
    folder, found = tmp_path_factory.mktemp("plans"), []
    for keys in ({}, NEW):
        config = config_of(folder, 4, **keys)
        found.append(basis_of(with_trained(llama(folder), config), config, "A100-80G"))
    return found


def test_the_last_stage_has_the_layers_weights_and_activations(bases: list[Any]) -> None:
    without, ahead = (MemoryModel(basis).rank(3, [(26, 34)]) for basis in bases)
    spec = bases[1].spec
    more = sum(prod(shape) for name, shape in spec.shapes(33).items() if name.startswith("ahead."))
    block = sum(prod(shape) for shape in spec.shapes(1).values())
    assert more == block + 2 * 4096 * 4096 + 3 * 4096
    assert ahead.weights - without.weights == pytest.approx(2 * more, rel=1e-6)
    assert ahead.activations > without.activations
    others = [MemoryModel(basis).rank(0, [(0, 9)]).peak for basis in bases]
    assert others[0] == others[1]


def test_the_last_layer_takes_a_block_and_another_head_longer(bases: list[Any]) -> None:
    without, ahead = (layer_times(basis) for basis in bases)
    block, heads = without[1].forward.total, [times[33].forward.total for times in (without, ahead)]
    assert heads[1] - heads[0] == pytest.approx(block + heads[0], rel=0.25)
    assert [each.forward for each in without[:33]] == [each.forward for each in ahead[:33]]


def test_blocks_leave_the_last_stage_for_it(bases: list[Any]) -> None:
    without, ahead = map(best_parts, bases)
    assert sum(without) == sum(ahead) == 34
    assert ahead[-1] < without[-1]

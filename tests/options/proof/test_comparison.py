"""The rows of a proof find what is wrong, and name the place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from options import load_config
from options.proof.command import CERTIFICATE, table, write_certificate
from options.proof.comparison import Row, choose_bounds, compare_bits, compare_row, is_flat, relative_difference
from tests.launching import write_config
from training.metrics.run_info import machine

GENERATOR = torch.Generator().manual_seed(0)
TIED = ("0.embed_tokens.weight", "4.lm_head.weight")


def place(name: str) -> str:
    return f"at {name}"


@pytest.fixture
def gradients() -> dict[str, Tensor]:
    return {
        name: torch.randn(8, 4, generator=GENERATOR) for name in ("0.embed_tokens.weight", "1.up.weight", "1.q.bias")
    }


def rows_of(found: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor] | None = None) -> Row:
    row = Row("gradients", choose_bounds(torch.float32, 5)[1])
    compare_row(row, place, found, expected, TIED, before)
    return row


def test_what_is_rounded_otherwise_holds(gradients: dict[str, Tensor]) -> None:
    row = rows_of({name: each * (1 + 1e-6) for name, each in gradients.items()}, gradients)
    assert row.holds and row.count == 3 and 0 < row.largest < 1e-5


def test_both_ends_of_a_tied_weight_may_hold_the_gradient(gradients: dict[str, Tensor]) -> None:
    assert rows_of(gradients | {TIED[1]: gradients[TIED[0]]}, gradients).holds


UP, BIAS = "1.up.weight", "1.q.bias"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor | None]], str]] = {
    **{
        f"times {factor}": (lambda found, factor=factor: {UP: found[UP] * factor}, UP)  # type: ignore[misc]
        for factor in (0.999, 2.0, -1.0, 0.0, math.nan, math.inf)
    },
    "one element": (lambda found: {BIAS: found[BIAS] + 0.01 * (torch.arange(32).view(8, 4) == 14)}, BIAS),
    "missing": (lambda found: {BIAS: None}, BIAS),
    "half of it on one tied end": (lambda found: {TIED[1]: found[TIED[0]] / 2}, TIED[1]),
}


@pytest.mark.parametrize("fault", WRONG)
def test_one_wrong_gradient_is_found_and_named(fault: str, gradients: dict[str, Tensor]) -> None:
    change, where = WRONG[fault]
    found = {name: each for name, each in (gradients | change(gradients)).items() if each is not None}
    row = rows_of(found, gradients)
    assert not row.holds and row.where == f"at {where}"
    if fault == "missing":
        row = rows_of(gradients, found)
        assert not row.holds and (row.largest, row.where) == (math.inf, f"at {where}")


def test_nothing_compared_is_nothing_proved() -> None:
    assert not Row("gradients", 1.0).holds


def test_a_wrong_update_is_seen_beside_a_large_weight(gradients: dict[str, Tensor]) -> None:
    before = {name: each * 0 + 1.0 for name, each in gradients.items()}
    after = {name: before[name] - 1e-3 * each.sign() for name, each in gradients.items()}
    assert rows_of(after, after, before).holds
    forgotten = rows_of(after | {"1.up.weight": before["1.up.weight"]}, after, before)
    assert not forgotten.holds and forgotten.where == "at 1.up.weight"


@pytest.mark.parametrize(
    ("gradient", "says_nothing"),
    [([0.0, 0.0], True), ([0.5, 0.5], True), ([1.0, math.nan], True), ([1.0, math.inf], True), ([0.0, 1e-12], False)],
)
def test_a_gradient_that_says_nothing(gradient: list[float], says_nothing: bool) -> None:
    assert is_flat(torch.tensor(gradient)) == says_nothing


def test_numbers() -> None:
    assert relative_difference(1.5, 1.0) == 0.5
    assert relative_difference(None, 1.0) == math.inf
    row = Row("loss", 1.0)
    row.note(relative_difference(math.nan, 1.0), place("step"))
    assert not row.holds


def test_bits_differ_by_dtype_shape_and_name(gradients: dict[str, Tensor]) -> None:
    one = gradients["1.up.weight"]
    for other in ({"w": one.bfloat16()}, {"w": one.view(4, 8)}, {"v": one}, {"w": one + 1e-7}):
        row = Row("bits", 0.0)
        compare_bits(row, place, other, {"w": one})
        assert not row.holds
    row = Row("bits", 0.0)
    compare_bits(row, place, {"w": one.clone()}, {"w": one})
    assert row.holds


@pytest.mark.parametrize("largest", [0.0, 2.0])
def test_certificate(largest: float, tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path / "run.yml", model_path="m", data_path="d"))
    (tmp_path / "run").mkdir()
    checkpoint = tmp_path / "run" / "latest"
    checkpoint.write_text("step-000001")
    rows = [Row("loss", 1.0, 4, largest, "step 3"), Row("weights", 0.0, 2)]
    path = write_certificate(config, config, ["lr: 1 -> 2"], rows, 12.34)
    assert path == tmp_path / "run" / CERTIFICATE
    content = json.loads(path.read_text())
    assert content["proved"] == (largest <= 1)
    assert [row["holds"] for row in content["rows"]] == [largest <= 1, True]
    assert content["rows"][0] | {"largest": largest, "bound": 1.0, "where": "step 3"} == content["rows"][0]
    assert content["versions"].keys() >= {"python", "torch", "deepspeed", "transformers"}
    assert content["seconds"] == 12.3 and content["machine"] == machine()
    assert content["small_config"]["model_path"] == "m"
    assert sorted(each.name for each in path.parent.iterdir()) == ["latest", CERTIFICATE]
    other = config.model_copy(update={"seed": 1})
    write_certificate(other, config, [], rows, 1.0)
    assert json.loads(path.read_text())["config_sha256"] != content["config_sha256"]
    assert table(rows, "title").row_count == 2

"""What keys of objectives have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from options import load_config
from tests.launching import write_config
from tests.training.config.test_changes import assert_refused
from training import train


def own(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.logsumexp(-1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("preference", {}), ("labels", ["a", "b"]), ("distillation", {"teacher": "t"})],
    ids=["preference", "labels", "distillation"],
)
def test_a_loss_of_ones_own_beside_another_objective(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as left:
        train(load_config(write_config(tmp_path / "run.yml", model_path="m", data_path="d", **{key: value})), loss=own)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {key}: has a loss, and so has this script; expected one")


DPO: dict[str, Any] = {"preference": {"loss": "dpo"}}


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({}, DPO, r"preference: {'loss': 'dpo'.*}, but .* with none"),
        (DPO, {}, r"preference: none, but .* with {'loss': 'dpo'"),
        (DPO, {"preference": {"loss": "ipo"}}, "preference.loss: ipo, but .* with dpo"),
        ({"preference": {"loss": "reward"}}, DPO, "preference.loss: dpo, but .* with reward"),
        (DPO, {"preference": {"loss": "dpo", "beta": 0.3}}, "preference.beta: 0.3, but .* with 0.1"),
        ({"labels": ["a", "b"]}, {}, r"labels: .*, but .* with \['a', 'b'\]"),
        ({"labels": ["a", "b"]}, {"preference": {"loss": "reward"}}, "preference: {.*'reward'.*}, but .* with none"),
    ],
)
def test_a_changed_objective_is_named_before_what_comes_of_it(
    then: dict[str, Any], now: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert_refused(then, now, message, tmp_path)

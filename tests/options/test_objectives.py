"""What keys of objectives have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from options import load_config
from tests.launching import write_config
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

"""What `training.train` refuses before it starts a process; tests/docs/test_api.py has the runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from options import load_config
from tests.launching import write_config
from training import train


def own(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.logsumexp(-1)


def test_a_loss_of_ones_own_beside_the_z_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    keys = {"model_path": "m", "data_path": "d", "aux_max_z_loss": {"weight": 0.1}}
    with pytest.raises(SystemExit) as left:
        train(load_config(write_config(tmp_path / "run.yml", **keys)), loss=own)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: aux_max_z_loss.weight: ")

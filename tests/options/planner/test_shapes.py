"""Shapes that come along: they are the published ones, and a config of any of them is planned without its folder."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

import train_ds
from models.api import read_spec
from options.planner.shapes import shape_of
from tests.cases import tiered
from tests.conftest import ROOT

CONFIGS = {
    path.stem: path
    for path in sorted((ROOT / "configs").glob("*.yml"))
    if path.stem not in ("quickstart", "ds_config_zero")
}
# Billions of parameters, as the models' cards have them.
PUBLISHED = {"llama-7b": 6.74, "mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.53, "deepseek-v3": 671.03, "bloom-7b1": 7.07}


@pytest.mark.parametrize("name", tiered(PUBLISHED, quick=["llama-7b", "mixtral-8x7b"]))
def test_a_shape_has_the_published_parameters(name: str) -> None:
    found = shape_of(f"../llm/{name}/base")
    assert found and found[0] == name
    spec = read_spec(Path(name), found[1])
    sizes = [math.prod(shape) for layer in range(spec.n_layers) for shape in spec.shapes(layer).values()]
    tied = math.prod(next(iter(spec.shapes(0).values()))) if spec.tied else 0
    assert round((sum(sizes) - tied) / 1e9, 2) == PUBLISHED[name]


def test_a_shape_stands_only_for_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert shape_of(str(tmp_path / "Qwen3-8B"))
    (tmp_path / "Qwen3-8B").mkdir()
    assert shape_of(str(tmp_path / "Qwen3-8B")) is None
    assert shape_of("../llm/my-own-7b/base") is None


METHODS = ["*-lora", "*-qlora", "*-dpo", "*-kto", "*-long"]


@pytest.mark.parametrize("name", tiered(CONFIGS, quick=["llama-7b", "mixtral-8x7b"], longest=METHODS))
def test_a_config_is_planned_in_a_fresh_clone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the config's comment names a figure, the plan gives it."""
    text = CONFIGS[name].read_text(encoding="utf-8").replace("\n#", "")
    claim = re.search(r"--devices (\S+)` a process takes at most (\d+) GB", text)
    planned = claim or re.search(r"--plan --devices (\S+)", text)
    devices = planned[1] if planned else "8xH200"
    words = ["--config", str(CONFIGS[name]), "--plan", "--devices", devices, f"save_path={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train_ds.py", *words])
    train_ds.main()
    printed = capsys.readouterr().out
    assert "planned by the known shape of" in printed
    found = re.search(r"fits: at most ([\d.]+) GB", printed)
    assert found, printed
    if claim:
        assert abs(float(found[1]) - int(claim[2])) < 0.01 * int(claim[2]) + 0.5

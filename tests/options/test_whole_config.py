"""The config with the keys of all options: its rules in the docs, the ready-made files, other tools' names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from options import RunConfig, load_config
from tests.conftest import ROOT
from tests.training.config.test_config import refusal, write
from tests.training.config.test_mistakes import keys_of
from training.config.foreign_names import FOREIGN

RULES = RunConfig.rules
CONFIGS = sorted((ROOT / "configs").glob("*.yml"))
PLANNED = re.compile(r"--config configs/(\S+) --plan --devices (\d+)xRTX4090")
SIZES = re.compile(r"on (\d+) GPUs, (\d+) blocks \+ 2 layers")  # in the first lines of a ready-made config


def test_the_docs_show_the_table() -> None:
    rows: dict[str, list[str]] = {}  # keys with one rule share a row
    for key, rule in RULES.items():
        if rule.free:
            message = f"free; {rule.effect}" if rule.effect else "free"
            message += f"; but {rule.but}" if rule.but else ""
        else:
            message = f"must agree{f': {rule.effect}' if rule.effect else ''}"
        rows.setdefault(message, []).append(f"`{key}`")
    shown = (ROOT / "docs" / "resuming.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in shown if line.startswith("| `")] == [
        f"| {', '.join(keys)} | {message} |" for message, keys in rows.items()
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_ready_made_config_loads_and_splits_the_layers_that_it_names(path: Path) -> None:
    config = load_config(path)
    sizes = SIZES.search(path.read_text(encoding="utf-8"))
    if path.stem in ("quickstart", "ds_config_zero", "ds_config_pp", "ds_config_pp_CN"):  # for any machine
        assert sizes is None
        return
    assert sizes is not None, "the first lines name the GPUs and the blocks"
    gpus, blocks = map(int, sizes.groups())
    assert config.model_topo.processes == gpus
    parts = config.parts_for(blocks + 2)
    if planned := PLANNED.search(path.read_text(encoding="utf-8")):
        assert parts is None and planned.groups() == (path.name, str(gpus))
    else:
        assert parts is not None and sum(parts) == blocks + 2


def test_each_key_of_another_tool_leads_to_ours(tmp_path: Path) -> None:
    known = set(keys_of(RunConfig))
    assert len(FOREIGN) > 60
    for name, (key, advice, _) in FOREIGN.items():
        assert key in known if key else advice, name
        assert name not in RunConfig.model_fields, name
        line = refusal(write(tmp_path, f"{name}: 1"))
        assert f": unknown key {name}; " in line
        assert (f"did you mean {key}?" if key else "") in line and line.count(advice) >= 1

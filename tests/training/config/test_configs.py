"""Shows that every ready-made config is valid and splits as many layers as its first lines say."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

from tests.conftest import ROOT
from training.config.yaml_file import load_config

CONFIGS = sorted((ROOT / "configs").glob("*.yml"))
SAID = re.compile(r"on (\d+) GPUs, (\d+) blocks \+ 2 layers")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_ready_made_config_loads_and_splits_the_layers_it_names(path: Path) -> None:
    config = load_config(path)
    said = SAID.search(path.read_text(encoding="utf-8"))
    if path.stem in ("quickstart", "ds_config_zero"):  # on the CPU, and on as many GPUs as there are
        assert said is None
        return
    assert said is not None, "the first lines name the GPUs and the blocks"
    gpus, blocks = map(int, said.groups())
    assert prod(config.model_topo.process_topology.dims) == gpus
    parts = config.parts_for(blocks + 2)
    assert parts is not None and sum(parts) == blocks + 2

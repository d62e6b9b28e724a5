"""Checkpoints with layers ahead, for tests."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from models.ahead.layers import Ahead
from models.ahead.model import looking_ahead
from models.ahead.names import BEHIND_THE_BLOCKS
from models.api import read_spec
from models.loading import SeededStates


def add_layers_ahead(folder: Path, depth: int) -> None:
    """Give a checkpoint random layers ahead, and the copies of embedding and head that published ones have."""
    spec = read_spec(folder)
    spec = looking_ahead(spec, Ahead(BEHIND_THE_BLOCKS, depth))
    state = load_file(folder / "model.safetensors")
    fresh = SeededStates(spec, 7).read_layer(spec.n_layers - 1)
    ahead = {name: tensor for name, tensor in fresh.items() if name.startswith("ahead.")}
    state |= spec.weight_map.on_disk(spec.n_layers - 1, ahead)
    for number in range(spec.n_blocks, spec.n_blocks + depth):
        state[f"model.layers.{number}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        if not spec.tied:
            state[f"model.layers.{number}.shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": depth}))

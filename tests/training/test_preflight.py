"""What differs between the hosts of a run is refused on all, with its name; here two ranks pass for hosts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import topology
from tests.ranks import Ranks
from training.preflight import BLOCK, BLOCKS, block_checksum

pytestmark = pytest.mark.launched

CONFIG: dict[str, Any] = {"model_path": "model", "data_path": "records", "save_path": "run"}
CONFIG |= {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model_topo": topology((2, 1)),
}
LAYERS = {"process_topology": {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}}


def model(folder: Path, **files: bytes) -> Path:
    """A folder with the files that a model has."""
    folder.mkdir()
    large = bytes(range(256)) * 4096
    named = {"config.json": b"{}", "model.safetensors": large, "README.md": os.urandom(8), ".cache": os.urandom(8)}
    for name, content in (named | {name.replace("_", "."): content for name, content in files.items()}).items():
        (folder / name).write_bytes(content)
    return folder


def architecture(folder: Path, width: int) -> Path:
    """A folder with the config.json of a llama."""
    shape = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"model_type": "llama", "num_key_value_heads": 4, "vocab_size": 256, "tie_word_embeddings": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields | shape))
    return folder


def test_what_differs_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    same, twin = model(tmp_path / "same"), model(tmp_path / "twin")
    other = model(tmp_path / "other", model_safetensors=bytes(range(255, -1, -1)) * 4096)
    more = model(tmp_path / "more", tokenizer_json=b"{}")
    mine = model(tmp_path / "mine", config_yml=b"seed: 1")
    begun = model(tmp_path / "begun", config_yml=b"seed: 1", run_json=b"{}")
    small, huge = architecture(tmp_path / "small", 64), architecture(tmp_path / "huge", 2**17)
    cases: list[dict[str, Any]] = [
        {"name": "same setup", "check": "setup", "keys": [{}, {}]},
        {"name": "other seed", "check": "setup", "keys": [{"seed": 1}, {"seed": 2}]},
        {"name": "one has a key", "check": "setup", "keys": [{}, {"max_steps": 7}]},
        {"name": "same model", "check": "model", "weights": True, "folders": [same, twin]},
        {"name": "other weights", "check": "model", "weights": True, "folders": [same, other]},
        {"name": "weights of no account", "check": "model", "weights": False, "folders": [same, other]},
        {"name": "a file more", "check": "model", "weights": True, "folders": [same, more]},
        {"name": "shared", "check": "shared", "folders": [same, same]},
        {"name": "a file of somebody's", "check": "shared", "folders": [mine, mine]},
        {"name": "a run's", "check": "shared", "folders": [begun, begun]},
        {"name": "not shared", "check": "shared", "folders": [same, twin]},
        {"name": "room", "check": "room", "folders": [small, small]},
        {"name": "no memory", "check": "room", "folders": [huge, huge]},
        {"name": "no memory for copies", "check": "room", "folders": [huge, huge], "config": {"save_async": True}},
        {"name": "no disk", "check": "room", "folders": [small, huge]},
        {"name": "local", "check": "local", "folders": [same, twin]},
        {"name": "layers of two hosts", "check": "local", "config": {"model_topo": LAYERS}},
        {"name": "not local", "check": "local", "folders": [same, same]},
    ]
    for case in cases:
        case["config"] = CONFIG | case.get("config", {})
        case["folders"] = [str(folder) for folder in case.get("folders", [same, same])]
    ranks.run(2, "preflight", cases, tmp_path)
    expected = {
        "same setup": None,
        "other seed": "seed: 2 on host node2, but 1 on host node1; expected the same",
        "one has a key": "max_steps: 7 on host node2, but none on host node1; expected the same",
        "same model": None,
        "other weights": "model_path: model.safetensors: 1,048,576 bytes with checksum",
        "weights of no account": None,
        "a file more": "model_path: tokenizer.json: 2 bytes with checksum",
        "shared": None,
        "a file of somebody's": f"save_path: {mine / 'config.yml'}: not written by a run, which would replace it; e",
        "a run's": None,
        "room": None,
        "no memory": "memory: ",
        "no memory for copies": "memory: ",
        "no disk": f"save_path: {small}: ",
        "not shared": f"host node2: save_path: {twin}: not what rank 0 writes to; expected a folder",
        "local": None,
        "layers of two hosts": "storage: local: node1 and node2 share layers; expected those who do on one host, or",
        "not local": f"save_path: {same}: hosts share it; expected a disk of its own on each, or storage: shared",
    }
    for name, message in expected.items():
        found = [json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in range(2)]
        assert found[0] == found[1]
        assert (found[0] or "").startswith(message or "") and (found[0] is None) == (message is None), found[0]
    needed = [json.loads((tmp_path / f"no memory{name}.0.json").read_text()) for name in ("", " for copies")]
    without, copied = (float(re.findall(r"more than ([\d.]+) GB", line)[0]) for line in needed)
    assert copied > 1.5 * without and "with the copies of save_async" in needed[1]  # 16 bytes a parameter, and 12
    assert not [path for folder in (same, twin) for path in folder.glob(".shared-*")]


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 3 * BLOCKS * BLOCK])
def test_both_ends_of_a_file_count(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = os.urandom(size)
    path.write_bytes(content)
    before = block_checksum([path])
    assert block_checksum([path]) == before
    for place in {0, size - 1} if size else set():
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert block_checksum([path]) != before

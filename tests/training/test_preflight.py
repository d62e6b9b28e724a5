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


def tuned_in_one_place() -> bytes:
    content = bytearray(bytes(range(256)) * 4096)
    content[100_000] ^= 1
    return bytes(content)


def architecture(folder: Path, width: int) -> Path:
    """A folder with the config.json of a llama."""
    shape = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"model_type": "llama", "num_key_value_heads": 4, "vocab_size": 256, "tie_word_embeddings": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields | shape))
    return folder


@pytest.mark.slow
def test_what_differs_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    same, twin = model(tmp_path / "same"), model(tmp_path / "twin")
    other = model(tmp_path / "other", model_safetensors=bytes(range(255, -1, -1)) * 4096)
    tuned = model(tmp_path / "tuned", model_safetensors=tuned_in_one_place())
    more = model(tmp_path / "more", tokenizer_json=b"{}")
    mine = model(tmp_path / "mine", config_yml=b"seed: 1")
    begun = model(tmp_path / "begun", config_yml=b"seed: 1", run_json=b"{}")
    small, huge = architecture(tmp_path / "small", 64), architecture(tmp_path / "huge", 2**17)
    (other / "common").mkdir()
    (other / "common" / "log.py").write_text("changed")
    setup, weights, shared, room, local = (
        {"check": "setup"},
        {"check": "model", "weights": True},
        {"check": "shared"},
        {"check": "room"},
        {"check": "local"},
    )
    # The case, and what its error begins with, if it has one.
    cases: dict[str, tuple[dict[str, Any], str | None]] = {
        "same setup": (setup, None),
        "other seed": (
            setup | {"keys": [{"seed": 1}, {"seed": 2}]},
            "seed: 2 on host node2, but 1 on host node1; expected the same",
        ),
        "one has a key": (
            setup | {"keys": [{}, {"max_steps": 7}]},
            "max_steps: 7 on host node2, but none on host node1; expected the same",
        ),
        "other code": ({"check": "code", "folders": [same, other]}, "code in common/: "),
        "other version": (setup | {"versions": {"torch": "0.0.1"}}, "version of torch: 0.0.1 on host node2, but "),
        "other clock": (setup | {"clock": 3600}, None),
        "same model": (weights | {"folders": [same, twin]}, None),
        "other weights": (
            weights | {"folders": [same, other]},
            "model_path: model.safetensors: 1,048,576 bytes with checksum",
        ),
        "another number": (weights | {"folders": [same, tuned]}, "model_path: model.safetensors: 1,048,576 bytes with"),
        "weights of no account": (weights | {"weights": False, "folders": [same, other]}, None),
        "a file more": (weights | {"folders": [same, more]}, "model_path: tokenizer.json: 2 bytes with checksum"),
        "shared": (shared, None),
        "a file of somebody's": (
            shared | {"folders": [mine, mine]},
            f"save_path: {mine / 'config.yml'}: not written by a run, which would replace it; e",
        ),
        "a run's": (shared | {"folders": [begun, begun]}, None),
        "not shared": (
            shared | {"folders": [same, twin]},
            f"host node2: save_path: {twin}: not what rank 0 writes to; expected a folder",
        ),
        "room": (room | {"folders": [small, small]}, None),
        "no memory": (room | {"folders": [huge, huge]}, "memory: "),
        "no memory for copies": (room | {"folders": [huge, huge], "config": {"save_async": True}}, "memory: "),
        "no disk": (room | {"folders": [small, huge]}, f"save_path: {small}: "),
        "local": (local | {"folders": [same, twin]}, None),
        "layers of two hosts": (
            local | {"config": {"model_topo": LAYERS}},
            "storage: local: node1 and node2 share layers; expected those who do on one host, or",
        ),
        "twins": (local | {"hosts": ["node1", "node1"]}, "storage: local: two hosts are called node1; expected a name"),
        "not local": (
            local,
            f"save_path: {same}: hosts share it; expected a disk of its own on each, or storage: shared",
        ),
    }
    defaults: dict[str, Any] = {
        "folders": [same, same],
        "hosts": ["node1", "node2"],
        "keys": [{}, {}],
        "clock": 0,
        "versions": {},
    }
    described = [defaults | case | {"name": name} for name, (case, _) in cases.items()]
    for case in described:
        case["config"] = CONFIG | case.get("config", {})
        case["folders"] = list(map(str, case["folders"]))
    ranks.run(2, "preflight", described, tmp_path)
    outcomes = {name: [json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in (0, 1)] for name in cases}
    for name, (_, message) in cases.items():
        error = outcomes[name][0]["error"]
        assert error == outcomes[name][1]["error"]
        assert (error or "").startswith(message or "") and (error is None) == (message is None), error
    assert "warning: the clock of host node2 is +3600 s from rank 0's" in outcomes["other clock"][0]["printed"]
    assert "warning" not in outcomes["same setup"][0]["printed"]
    needed = [outcomes[f"no memory{name}"][0]["error"] for name in ("", " for copies")]
    without, copied = (float(re.findall(r"more than ([\d.]+) GB", line)[0]) for line in needed)
    assert copied > 1.5 * without and "with the copies of save_async" in needed[1]  # 16 bytes a parameter, and 12
    assert not [path for folder in (same, twin) for path in folder.glob(".shared-*")]

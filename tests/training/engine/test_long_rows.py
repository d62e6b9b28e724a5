"""Rows of 131,072 tokens that processes share: loss and gradients are those of one process without an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from models import load_model
from tests.launching import topology
from tests.ranks import Ranks

pytestmark = [pytest.mark.launched, pytest.mark.longest]

ROW = 131_072
DOCUMENTS = (98_304, 32_768)  # packed into one row
WORDS = 64
NARROW: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": WORDS,
    "max_position_embeddings": ROW,
}
SHARED: dict[str, dict[str, Any]] = {
    "rows": topology((1, 2)) | {"sequence": 2},
    "rows_of_two_stages": topology((2, 2)) | {"sequence": 2},
}


@pytest.mark.parametrize("way", SHARED)
def test_a_row_of_131072_tokens(way: str, ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    generator = random.Random(0)
    samples = []
    for length in DOCUMENTS:
        ids = [generator.randrange(3, WORDS) for _ in range(length)]
        samples.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    folder, topo = make_checkpoint("llama", **NARROW), SHARED[way]
    config = {
        "model_path": str(folder),
        "data_path": str(tmp_path / "samples.json"),
        "save_path": str(tmp_path),
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "max_seq_len": ROW,
        "pack_len": ROW,
        "gradient_clipping": 0.0,
        "model_topo": topo,
    }
    stages, replicas = topo["process_topology"]["dims"]
    ranks.run(stages * replicas, "gradients", [{"name": way, "kind": "pipeline", "config": config}], tmp_path)
    found: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob(f"{way}.stage*.safetensors"):
        found |= load_file(path)
    model, supervised = load_model(folder), sum(length - length // 2 for length in DOCUMENTS)
    loss = torch.zeros(())
    for sample in samples:
        logits = model(torch.tensor([sample["input_ids"]]))[0, :-1]
        loss = loss + F.cross_entropy(logits, torch.tensor(sample["labels"][1:]), reduction="sum") / supervised
    loss.backward()
    torch.testing.assert_close(json.loads((tmp_path / f"{way}.json").read_text())["loss"], loss.item())
    expected = {name.removeprefix("layers."): weight.grad for name, weight in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        whole = expected[name]
        assert whole is not None and (gradient - whole).norm() < 1e-5 * whole.norm(), name

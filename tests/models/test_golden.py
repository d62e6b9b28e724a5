"""Shows that the stored logits, losses and gradient norms of the golden checkpoints come out, from both layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models import load_model
from models.loss import token_loss
from tests.models.helpers import LAYOUTS, copy_of, gradients, in_layout

NAMES = ["bloom-tiny", "llama-tiny", "llama-untied-tiny"]


@pytest.fixture(params=[f"{name}-{config}" for name in NAMES for config in ("config", "config.legacy")])
def golden(request: pytest.FixtureRequest, shared: Path, tmp_path: Path) -> Path:
    """A copy of a golden checkpoint, with the field names of one age of transformers in config.json."""
    name, _, config = request.param.rpartition("-")
    folder = copy_of(shared / "golden" / name, tmp_path / "golden")
    (folder / "config.json").write_bytes((folder / f"{config}.json").read_bytes())
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_values_come_out(golden: Path, layout: str, tmp_path: Path) -> None:
    model = load_model(in_layout(golden, layout, tmp_path / "layers"))
    inputs = load_file(golden / "expected.safetensors")
    wanted = json.loads((golden / "expected.json").read_text())
    ids = inputs["input_ids"]
    torch.testing.assert_close(model(ids), inputs["logits"], atol=1e-5, rtol=0)

    loss = token_loss(model.head.norm(model.hidden_states(ids)), inputs["labels"], model.head.project)
    loss = loss / wanted["n_loss_tokens"]
    assert loss.item() == pytest.approx(wanted["loss"], abs=1e-5)

    loss.backward()
    norms = {name: float(gradient.norm()) for name, gradient in gradients(model).items()}
    assert norms == pytest.approx(wanted["grad_norms"], rel=1e-5)
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(wanted["global_grad_norm"], rel=1e-5)

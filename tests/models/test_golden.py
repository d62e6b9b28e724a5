"""Shows that the stored logits, losses and gradient norms of the golden checkpoints come out, from both layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models import CausalLM, load_model
from models.loss import token_loss
from models.router import router_loss
from tests.models.helpers import LAYOUTS, copy_of, gradients, in_layout

OWN_CODE = ["baichuan2-7b-tiny", "baichuan2-13b-tiny", "chatglm3-tiny"]
TRANSFORMERS = ["bloom-tiny", "llama-tiny", "llama-untied-tiny", "mixtral-tiny"]
CONFIGS = [(name, "config") for name in OWN_CODE + TRANSFORMERS] + [(name, "config.legacy") for name in TRANSFORMERS]
ROUTER_LOSS_COEF = 0.02


@pytest.fixture(params=CONFIGS, ids="-".join)
def golden(request: pytest.FixtureRequest, shared: Path, tmp_path: Path) -> Path:
    """A copy of a golden checkpoint, with the field names of one age of transformers in config.json."""
    name, config = request.param
    folder = copy_of(shared / "golden" / name, tmp_path / "golden")
    (folder / "config.json").write_bytes((folder / f"{config}.json").read_bytes())
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_values_come_out(golden: Path, layout: str, tmp_path: Path) -> None:
    model = load_model(in_layout(golden, layout, tmp_path / "layers"))
    inputs = load_file(golden / "expected.safetensors")
    wanted = json.loads((golden / "expected.json").read_text())
    stream = model.activations(inputs["input_ids"])
    torch.testing.assert_close(model.head(stream), inputs["logits"], atol=1e-5, rtol=0)

    loss = token_loss(model.head.norm(stream[0]), inputs["labels"], model.head) / wanted["n_loss_tokens"]
    assert loss.item() == pytest.approx(wanted["loss"], abs=1e-5)
    loss.backward(retain_graph=True)
    norms = gradient_norms(model)
    assert norms == pytest.approx(wanted["grad_norms"], rel=1e-5)
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(wanted["global_grad_norm"], rel=1e-5)

    assert (len(stream) > 2) == ("aux_loss" in wanted)
    for sums in stream[2:]:
        balance = router_loss(sums, model.spec.config.num_experts_per_tok)
        assert balance.item() == pytest.approx(wanted["aux_loss"], abs=1e-5)
        assert (loss + ROUTER_LOSS_COEF * balance).item() == pytest.approx(wanted["loss_with_aux"], abs=1e-5)
        (ROUTER_LOSS_COEF * balance).backward()
        assert gradient_norms(model) == pytest.approx(wanted["grad_norms_with_aux"], rel=1e-5)


def gradient_norms(model: CausalLM) -> dict[str, float]:
    """By name on disk."""
    return {name: float(gradient.norm()) for name, gradient in gradients(model).items()}

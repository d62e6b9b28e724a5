"""The reference of a proof is transformers' own model and torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from data.sample_set import Sample
from models.adapters import Lora, Trained
from models.api import read_spec
from models.checkpoint.peft_names import peft_name, to_peft
from options import RunConfig
from options.proof.reference import Reference
from options.proof.small_run import small_trained
from tests.closeness import assert_near
from tests.models.adapters import save_adapter
from training.trained import with_trained


@pytest.fixture
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in (5, 40, 17, 23)]
    return [{"input_ids": each, "labels": [-100] * (len(each) // 3) + each[len(each) // 3 :]} for each in ids]


def test_a_step_is_that_of_transformers_and_torch(samples: list[Sample], make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=True)
    keys = {"model_path": str(folder), "data_path": "d", "save_path": "s", "train_batch_size": 4, "max_steps": 10}
    params = {"lr": 0.01, "weight_decay": 0.1}
    config = RunConfig.model_validate(keys | {"gradient_clipping": 0.5, "optimizer": {"params": params}})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    supervised = sum(label != -100 for sample in samples for label in sample["labels"][1:])

    def mean_loss() -> torch.Tensor:
        parts = []
        for sample in samples:
            logits = model(torch.tensor([sample["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(sample["labels"][1:])
            parts.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        return torch.stack(parts).sum() / supervised

    loss = mean_loss()
    loss.backward()
    embedding, norm = model.get_input_embeddings().weight, model.model.norm.weight
    gradients = {"0.embed_tokens.weight": embedding.grad.clone(), "4.norm.weight": norm.grad.clone()}
    reference = Reference(config, samples)
    step = reference.step(1, {})  # no gradients: the weights only decay
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in gradients.items():
        assert ((step.gradients[name] - gradient).norm() / gradient.norm()).item() < 1e-5
    torch.testing.assert_close(step.weights["4.norm.weight"], norm.detach() * (1 - 0.01 * 0.1))
    again = Reference(config, samples, samples)
    found = again.step(1, step.gradients)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1).step()
    assert found.norm == pytest.approx(total.item(), rel=1e-5) and total > 0.5
    torch.testing.assert_close(found.weights["0.embed_tokens.weight"], embedding.detach(), atol=1e-5, rtol=0)
    assert again.evaluate() == pytest.approx(mean_loss().item(), rel=1e-4)
    assert again.evaluate() < loss.item()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_adapters_are_those_of_peft(family: str, samples: list[Sample], make_checkpoint: Callable[..., Path]) -> None:
    base = make_checkpoint(family, num_local_experts=4, num_experts_per_tok=2)
    keys = {"model_path": str(base), "data_path": "d", "save_path": "s", "train_batch_size": 4, "max_steps": 10}
    keys |= {"optimizer": {"params": {"lr": 0.01}}} | (
        {"aux_router_loss": {"weight": 0}} if family == "mixtral" else {}
    )
    lora = {"r": 2, "alpha": 6, "rslora": True}
    spec = read_spec(base).training(Trained(Lora(**lora)))  # type: ignore[arg-type]
    adapter = save_adapter(spec, base)
    step = Reference(RunConfig.model_validate(keys | {"lora": lora | {"start_from": str(adapter)}}), samples).step(
        1, {}
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    total = torch.zeros(())
    for sample in samples:
        logits = theirs(torch.tensor([sample["input_ids"]])).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(sample["labels"][1:]), reduction="sum")
    loss = total / sum(label != -100 for sample in samples for label in sample["labels"][1:])
    loss.backward()
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    split = {name: name.split(".", 1) for name in step.gradients}
    found = {
        peft_name(spec, int(layer), name): to_peft(name, step.gradients[whole])
        for whole, (layer, name) in split.items()
    }
    wanted = {
        name.replace(".default", ""): each.grad for name, each in theirs.named_parameters() if each.grad is not None
    }
    assert_near(found, wanted)


def test_what_is_trained_fits_the_small_model(make_checkpoint: Callable[..., Path]) -> None:
    spec = read_spec(make_checkpoint("llama"))
    keys = {
        "model_path": "m",
        "data_path": "d",
        "save_path": "s",
        "train_batch_size": 4,
        "optimizer": {"params": {"lr": 1}},
    }
    lora = {"r": 64, "dropout": 0.1, "targets": ["layers.30.mlp.up_proj"], "start_from": "a"}
    small, differs = small_trained(RunConfig.model_validate(keys | {"lora": lora}), spec)
    assert small.lora and (small.lora.r, small.lora.targets, small.lora.dropout) == (32, "all-linear", 0.0)
    assert [line.partition(":")[0] for line in differs] == ["lora.targets", "lora.r", "lora", "lora.dropout"]
    small, (line,) = small_trained(RunConfig.model_validate(keys | {"freeze": [r"layers\.30\."]}), spec)
    assert with_trained(spec, small) and line.startswith("freeze: model.embed_tokens.weight")

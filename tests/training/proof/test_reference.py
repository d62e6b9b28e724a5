"""The reference of a proof is transformers' own model and torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from data.sample_set import Sample
from models.adapters import Lora, Trained
from models.api import read_spec
from models.checkpoint.adapter import peft_name, to_peft
from options import RunConfig
from tests.closeness import assert_near
from tests.models.adapters import save_adapter
from tests.models.test_scores import save_scoring
from training.proof.reference import Reference
from training.proof.small_run import small_trained
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


JUDGED: dict[str, dict[str, Any]] = {
    "dpo": {"preference": {"loss": "dpo", "beta": 0.3, "sft_weight": 0.5}},
    "simpo": {"preference": {"loss": "simpo", "beta": 2.0, "gamma": 0.4}},
    "orpo": {"preference": {"loss": "orpo", "beta": 0.3}},
    "reward": {"preference": {"loss": "reward", "center_weight": 0.1}},
    "classes": {"labels": ["a", "b", "c"]},
}


def trained_words(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    """The log-probabilities of a document's trained tokens."""
    targets, trained = torch.tensor(sample["input_ids"][1:]), torch.tensor(sample["labels"][1:]) >= 0
    return torch.log_softmax(logits[:-1], -1).gather(-1, targets[:, None]).squeeze(-1)[trained]


@pytest.mark.parametrize("name", JUDGED)
def test_preferences_and_scores_are_those_of_transformers(
    name: str, samples: list[Sample], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Two samples of two answers each, or four of one document."""
    scores = {"reward": 1, "classes": 3}.get(name, 0)
    changes = {"tie_word_embeddings": False}
    folder = save_scoring(tmp_path, "llama", scores, **changes) if scores else make_checkpoint("llama", **changes)
    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits = [model(input_ids=torch.tensor([each["input_ids"]])).logits[0] for each in samples]
    judged: list[Sample] = [{**sample, "value": float(n % 3)} for n, sample in enumerate(samples)]
    if name != "classes":
        halves = list(zip(samples[::2], samples[1::2], strict=True))
        judged = [
            {
                "input_ids": one["input_ids"] + two["input_ids"],
                "labels": one["labels"] + two["labels"],
                "first": len(one["input_ids"]),
                "value": 0.5,
            }
            for one, two in halves
        ]
    if name == "classes":
        loss = F.cross_entropy(torch.stack(logits), torch.tensor([0, 1, 2, 0]))
    elif name == "reward":
        better, worse = torch.stack([each.squeeze() for each in logits]).view(2, 2).T
        loss = (-F.logsigmoid(better - worse - 0.5) + 0.1 * (better + worse) ** 2).mean()
    else:
        words = [trained_words(*each) for each in zip(logits, samples, strict=True)]
        better, worse = torch.stack([each.sum() for each in words]).view(2, 2).T
        tokens = sum(len(each) for each in words[::2])
        if name == "dpo":  # against itself, as before the first step
            loss = -F.logsigmoid(0.3 * ((better - worse) - (better - worse).detach())).mean()
            loss = loss - 0.5 * better.sum() / tokens
        else:
            means = torch.stack([each.mean() for each in words])
            odds = means - torch.log1p(-means.exp())
            one, two = (odds if name == "orpo" else means).view(2, 2).T
            loss = -F.logsigmoid(2.0 * (one - two) - 0.4).mean()
            if name == "orpo":
                loss = -0.3 * F.logsigmoid(one - two).mean() - better.sum() / tokens
    loss.backward()
    keys = {"model_path": str(folder), "data_path": "d", "save_path": "s", "train_batch_size": len(judged)}
    keys |= {"max_steps": 10, "optimizer": {"params": {"lr": 0.01}}}
    reference = Reference(RunConfig.model_validate(keys | JUDGED[name]), judged)
    for size in (1, len(judged)):
        cut = RunConfig.model_validate(keys | JUDGED[name] | {"train_batch_size": size})
        assert Reference(cut, judged, judged).evaluate() == pytest.approx(loss.item(), rel=1e-5)
    step = reference.step(1, {})
    assert step.loss == pytest.approx(loss.item(), rel=1e-5)
    wanted = {
        "0.embed_tokens.weight": model.get_input_embeddings().weight.grad,
        "4.norm.weight": model.model.norm.weight.grad,
    }
    assert_near({each: step.gradients[each] for each in wanted}, wanted)
    if not scores:
        means_of = [better.mean().item(), worse.mean().item()]
        assert list(step.noted.values()) == pytest.approx(means_of, rel=1e-5)


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

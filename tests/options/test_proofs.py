"""The formulas of other objectives are the reference of a proof."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from data.sample_set import Sample
from options import RunConfig
from options.proof.reference import Reference
from tests.closeness import assert_near
from tests.launching import topology
from tests.models.test_scores import save_scoring
from tests.options.proof.test_prove import SHARED, Proofs
from tests.workers.preference_faults import FAULTS


@pytest.fixture
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in (5, 40, 17, 23)]
    return [{"input_ids": each, "labels": [-100] * (len(each) // 3) + each[len(each) // 3 :]} for each in ids]


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


LAUNCHED = pytest.mark.launched


LORA = {"r": 8, "alpha": 16, "start_from": "elsewhere"}


@pytest.fixture
def proofs(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> Proofs:
    return Proofs(tmp_path, make_checkpoint)


DPO: dict[str, Any] = {"loss": "dpo", "sft_weight": 0.2}


REWARD = {"loss": "reward", "center_weight": 0.1}


CLASSES = ["even", "odd", "none"]


@LAUNCHED
@pytest.mark.longest
@pytest.mark.parametrize(
    "keys",
    [
        {"preference": DPO},
        {"preference": {"loss": "dpo"}, "lora": LORA, "bf16": {"enabled": True}},
        {"preference": {"loss": "cdpo"}, "schedule": "dualpipev", "model_topo": topology((2, 1))},
        {"preference": {"loss": "ipo"}, "packing": False},
        {"preference": {"loss": "simpo"}, "model_topo": topology((2, 2))},
        {"preference": {"loss": "orpo"}, "bf16": {"enabled": True}, "model_topo": SHARED},
        {"preference": REWARD, "packing": "dataset"},
        {"preference": REWARD, "lora": LORA, "model_topo": SHARED},
        {"labels": CLASSES, "bf16": {"enabled": True}, "model_topo": SHARED},
        {"labels": CLASSES, "lora": LORA, "model_topo": topology((1, 2))},
    ],
    ids=str,
)
def test_preferences_and_scores_are_proved(keys: dict[str, Any], proofs: Proofs) -> None:
    result = proofs.prove(proofs.judged("labels" in keys, **keys))
    assert result.returncode == 0, result.stdout + result.stderr
    assert proofs.failed() == {}
    rows = {row["what"] for row in proofs.certificate()["rows"]}
    assert ("log-probabilities of answers" in rows) == (keys.get("preference", REWARD)["loss"] != "reward")


@LAUNCHED
@pytest.mark.longest
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_preferences_is_found(fault: str, proofs: Proofs) -> None:
    config = proofs.judged(preference={"loss": "dpo"}, lora=LORA)
    result = proofs.prove(config, "tests/workers/unproved.py", FAULT=fault)
    if fault == "same_digest":  # the run itself sees that what is kept is another model's
        assert result.returncode == 2 and "error: the small run ended with exit code 2: reference: " in result.stderr
        return
    assert result.returncode == 1, result.stdout + result.stderr
    assert proofs.failed().keys() & {"loss", "log-probabilities of answers"}

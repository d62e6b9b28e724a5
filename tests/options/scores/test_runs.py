"""Runs that train reward models and classifiers equal transformers' classes trained by torch, in every topology.

The jobs run in the same two processes (tests/workers/jobs.py). What a run exports is what transformers loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from data.tokenized.sample_file import SampleFile
from models import load_model
from models.adapters import Lora, Trained
from models.api import read_spec
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from tests.closeness import assert_near
from tests.launching import metrics, topology
from tests.models.adapters import save_adapter
from tests.models.test_scores import save_scoring
from tests.ranks import Ranks, job
from training.checkpoint.folder import step_folder

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS, LR, CENTER = 6, 1e-4, 0.02
ADAMW: dict[str, Any] = {"lr": LR, "weight_decay": 0.0, "betas": [0.9, 0.99], "eps": 1e-6}
PIPE = {"model_topo": topology((2, 1))}
REWARD: dict[str, Any] = {"preference": {"loss": "reward", "center_weight": CENTER}}
CLASSES: dict[str, Any] = {"labels": ["even", "odd", "none"]}
LORA: dict[str, Any] = {"r": 2, "alpha": 6}
SHARED = {"model_topo": {"process_topology": {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}}}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "reward": ("reward", REWARD | PIPE),
    "reward-dualpipev": ("reward", REWARD | PIPE | {"schedule": "dualpipev"}),
    "reward-sequence": ("reward", REWARD | {"model_topo": topology((1, 2)) | {"sequence": 2}}),
    "classes": ("classes", CLASSES | PIPE),
    "classes-replicas": ("classes", CLASSES | {"model_topo": topology((1, 2))}),
    "classes-again": ("classes", CLASSES | PIPE | {"resume": "classes"}),
    "reward-shared": ("reward", REWARD | SHARED),
    "classes-shared": ("classes", CLASSES | SHARED),
    "reward-adapter": ("reward", REWARD | PIPE | {"lora": LORA}),
    "reward-adapter-shared": ("reward", REWARD | SHARED | {"lora": LORA}),
    "classes-adapter": ("classes", CLASSES | {"model_topo": topology((1, 2)), "lora": LORA}),
    "from-language": ("language", REWARD | PIPE),
    "adapter-of-language": ("language", REWARD | PIPE | {"lora": LORA, "schedule": "dualpipev"}),
    "adapter-again": (
        "language",
        REWARD | {"model_topo": topology((1, 2)), "lora": LORA, "resume": "adapter-of-language"},
    ),
    "scores-as-words": ("reward", {"preference": {"loss": "dpo"}} | PIPE),
}
EQUAL = (
    *(
        "reward",
        "reward-dualpipev",
        "reward-sequence",
        "reward-shared",
        "classes",
        "classes-replicas",
        "classes-shared",
    ),
    *("reward-adapter", "reward-adapter-shared", "classes-adapter"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("score-runs")


@pytest.fixture(scope="module")
def models(folder: Path, make_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {
        "reward": save_scoring(folder / "reward-model", "llama", 1, tie_word_embeddings=True),
        "classes": save_scoring(folder / "class-model", "llama", 3),
        "language": make_checkpoint("llama", tie_word_embeddings=True),
    }


@pytest.fixture(scope="module")
def adapters(models: dict[str, Path]) -> dict[str, Path]:
    """Random adapters to start from, as with a B of zeros nothing reaches A."""
    lora = Lora(**LORA, modules_to_save=("score",))
    kinds = ("reward", "classes")
    return {kind: save_adapter(read_spec(models[kind]).training(Trained(lora)), models[kind]) for kind in kinds}


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, models: dict[str, Path], adapters: dict[str, Path]) -> dict[str, Any]:
    pairs = [
        {
            "prompt": f"How many has {n}?",
            "chosen": f"It has {n}." * (n % 3 + 1),
            "rejected": "No" * (n % 5 + 1),
            "margin": n / 8,
        }
        for n in range(8)
    ]
    texts = [{"text": f"{'What a day it is. ' * (n % 4)}Day {n}", "label": n % 3} for n in range(8)]
    for name, records in (("pairs", pairs), ("texts", texts)):
        (folder / f"{name}.json").write_text(json.dumps(records))
    cases = []
    for name, (model, keys) in JOBS.items():
        own: dict[str, Any] = {
            "model_path": str(models[model]),
            "data_path": str(folder / ("texts.json" if "labels" in keys else "pairs.json")),
            "n_epoches": STEPS,
            "save_interval": 3,
            "gradient_clipping": 0,
            "scheduler": None,
            "optimizer": {"type": "AdamW", "params": ADAMW},
        } | keys
        if "lora" in keys and model in adapters:
            own["lora"] = LORA | {"start_from": str(adapters[model])}
        if "resume" in keys:
            own["resume"] = str(step_folder(folder / keys["resume"], 3))
        cases.append(job(folder, name, **own))
    return ranks.jobs(cases, folder)


@pytest.fixture(scope="module")
def by_torch(
    outcomes: dict[str, Any], folder: Path, models: dict[str, Path], adapters: dict[str, Path]
) -> Callable[[str, bool], Any]:
    """Losses and weights of transformers' class after as many steps of torch's optimizer, on the run's own tokens."""
    made: dict[tuple[str, bool], tuple[list[float], dict[str, Tensor]]] = {}

    def get(kind: str, adapted: bool) -> tuple[list[float], dict[str, Tensor]]:
        if (kind, adapted) not in made:
            model = AutoModelForSequenceClassification.from_pretrained(models[kind], attn_implementation="eager")
            if adapted:
                model = PeftModel.from_pretrained(model, adapters[kind], is_trainable=True)
            made[kind, adapted] = trained(model, kind, folder)
        return made[kind, adapted]

    return get


def trained(model: Any, kind: str, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    records = json.loads((folder / ("pairs.json" if kind == "reward" else "texts.json")).read_text())
    tokens = documents_of(folder, pairs=kind == "reward")
    losses = []
    for _ in range(STEPS):
        found = []
        for record, documents in zip(records, tokens, strict=True):
            scores = [model(input_ids=torch.tensor([ids])).logits[0] for ids in documents]
            if kind == "reward":
                better, worse = (each[0] for each in scores)
                found.append(-F.logsigmoid(better - worse - record["margin"]) + CENTER * (better + worse) ** 2)
            else:
                found.append(F.cross_entropy(scores[0][None], torch.tensor([record["label"]])))
        loss = torch.stack(found).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def documents_of(folder: Path, pairs: bool) -> list[list[list[int]]]:
    """The token ids of the one or two documents of each record, as the runs have them."""
    for cache in (folder / "cache" / "datasets").iterdir():
        samples = SampleFile(cache)
        firsts = samples.column("first").tolist()
        if (min(firsts) > 0) == pairs:
            ids = [sample["input_ids"].tolist() for sample in samples]  # type: ignore[attr-defined]
            return [[each[:n], each[n:]] if n else [each] for n, each in zip(firsts, ids, strict=True)]
    raise AssertionError("no such records in the cache")


@pytest.mark.parametrize("name", EQUAL)
def test_losses_and_weights_equal_transformers(
    name: str, outcomes: dict[str, Any], by_torch: Callable[[str, bool], Any], folder: Path, models: dict[str, Path]
) -> None:
    assert outcomes[name]["error"] is None
    (kind, _), adapted = JOBS[name], "lora" in JOBS[name][1]
    losses, weights = by_torch(kind, adapted)
    assert [line["loss"] for line in metrics(folder / name)] == pytest.approx(losses, rel=2e-5)
    pp_to_hg(folder / name, folder / f"{name}-hf")
    exported = AutoModelForSequenceClassification.from_pretrained(models[kind] if adapted else folder / f"{name}-hf")
    if adapted:
        exported = PeftModel.from_pretrained(exported, folder / f"{name}-hf")
    assert_near(dict(exported.state_dict()), dict(weights))


def test_measures_are_those_of_the_loss(outcomes: dict[str, Any], folder: Path) -> None:
    assert all(outcomes[name]["error"] is None for name in ("reward", "classes"))
    reward, classes = (metrics(folder / name)[-1] for name in ("reward", "classes"))
    assert reward["rewards/margins"] == pytest.approx(reward["rewards/chosen"] - reward["rewards/rejected"])
    assert "logps/chosen" not in reward and 0 <= reward["rewards/accuracies"] <= 1
    assert 0 < classes["accuracy"] <= 1 and "rewards/accuracies" not in classes


def test_a_classifier_goes_on_to_the_last_bit(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["classes-again"]["error"] is None
    lines = {line["step"]: line["loss"] for line in metrics(folder / "classes")}
    assert [line["loss"] for line in metrics(folder / "classes-again")] == [lines[step] for step in (4, 5, 6)]


def test_a_language_model_becomes_a_reward_model(
    outcomes: dict[str, Any], folder: Path, models: dict[str, Path]
) -> None:
    """Its blocks begin as they were, its head is new; transformers loads the export with the same scores."""
    assert outcomes["from-language"]["error"] is None
    pp_to_hg(folder / "from-language", folder / "from-language-hf")
    exported = AutoModelForSequenceClassification.from_pretrained(folder / "from-language-hf").eval()
    assert exported.config.id2label == {0: "reward"}
    ids = torch.randint(3, 500, (1, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_near(load_model(folder / "from-language")(ids)[0, -1], exported(ids).logits[0])
    began = AutoModelForCausalLM.from_pretrained(models["language"]).model.embed_tokens.weight
    assert (exported.model.embed_tokens.weight - began).abs().max() < 2 * STEPS * LR


def test_an_adapter_of_a_language_model_scores_by_peft_and_merged(
    outcomes: dict[str, Any], folder: Path, models: dict[str, Path]
) -> None:
    """Its folder has the head, which is trained from the seed; the base stays as it was."""
    assert outcomes["adapter-of-language"]["error"] is None
    run, ids = (
        folder / "adapter-of-language",
        torch.randint(3, 500, (1, 17), generator=torch.Generator().manual_seed(1)),
    )
    pp_to_hg(run, folder / "adapter-hf")
    pp_to_hg(run, folder / "merged-hf", options=ExportOptions(merge=True))
    settings = json.loads((folder / "adapter-hf" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = AutoModelForSequenceClassification.from_pretrained(models["language"], num_labels=1)
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "merged-hf").eval()
    assert merged.config.id2label == {0: "reward"}
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, folder / "adapter-hf").eval()(ids).logits[0]
        ours = load_model(run), load_model(models["language"], adapter=folder / "adapter-hf")
        assert all(model.spec.labels == ["reward"] for model in ours)
        for scores in (*(model(ids)[0, -1] for model in ours), merged(ids).logits[0]):
            assert_near(scores, expected)


def test_an_adapter_with_a_head_goes_on_in_another_topology(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["adapter-again"]["error"] is None
    lines = {line["step"]: line["loss"] for line in metrics(folder / "adapter-of-language")}
    found = [line["loss"] for line in metrics(folder / "adapter-again")]
    assert found == pytest.approx([lines[step] for step in (4, 5, 6)], rel=1e-5) and lines[6] < lines[1]


def test_a_model_that_scores_is_no_language_model(outcomes: dict[str, Any]) -> None:
    assert "scores texts (LABEL_0) and writes none" in outcomes["scores-as-words"]["error"]

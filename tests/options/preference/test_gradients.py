"""Preferences through the real launcher: loss, log-probabilities of a reference and every gradient, as one process has.

The one process runs each document by itself and writes the papers' formulas out with torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.sample_set import InMemory, Sample
from models import load_model
from models.adapters import Lora, Trained
from models.api import read_spec
from models.causal_lm import CausalLM
from models.checkpoint.adapter import AdaptedStates, PeftFolder
from models.checkpoint.source import open_source
from options.preference.mismatch import Mismatched
from tests.cases import tiered
from tests.closeness import assert_near
from tests.matrix import MODELS, Outcome, alone, assert_same, step, take
from tests.models.adapters import save_adapter
from tests.ranks import Ranks
from tests.workers.gradients import shifted
from tests.workers.preference_faults import FAULTS, same_digest

pytestmark = pytest.mark.launched

ROW, BETA = 128, 0.4
LIMIT = 40  # which cuts some prompts with answers to others
LORA: dict[str, Any] = {"r": 2, "alpha": 6}
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"loss": "dpo", "beta": BETA},
    "dpo_and_sft": {"loss": "dpo", "beta": BETA, "sft_weight": 0.5},
    "cdpo": {"loss": "cdpo", "beta": BETA, "label_smoothing": 0.2},
    "ipo": {"loss": "ipo", "beta": BETA},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.3},
    "orpo": {"loss": "orpo", "beta": BETA},
    "kto": {"loss": "kto", "beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "apo": {"loss": "apo_zero_unpaired", "beta": BETA},
}


class Case(NamedTuple):
    loss: str = "dpo"
    dims: tuple[int, ...] = (2, 1)
    model: str = "tied"
    variant: str = ""
    keys: dict[str, Any] = {}
    fault: str = ""

    @property
    def unpaired(self) -> bool:
        return self.loss in ("kto", "apo")

    @property
    def name(self) -> str:
        words = self.loss, self.model, "x".join(map(str, self.dims)), self.variant, self.fault
        return "-".join(filter(None, words))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bf16" in self.keys else torch.float32


CASES = [
    *(Case(loss, (1, 1)) for loss in LOSSES),
    Case(),
    Case("dpo_and_sft", (1, 2), variant="sequence", keys={"sequence": 2}),
    Case("dpo_and_sft", (2, 2)),
    Case("dpo_and_sft", variant="dualpipev", keys={"schedule": "dualpipev"}),
    *(Case("kto", dims) for dims in ((2, 1), (2, 2))),
    Case("kto", (1, 2), variant="sequence", keys={"sequence": 2}),
    Case("kto", variant="dualpipev", keys={"schedule": "dualpipev"}),
    Case("kto", (2, 2), variant="unpacked", keys={"packing": False}),
    Case("kto", (1, 2), variant="zero3", keys={"zero_optimization": {"stage": 3}}),
    Case("kto", model="untied", variant="lora", keys={"lora": LORA}),
    Case("kto", (1, 1, 2), model="untied", variant="model"),
    Case("dpo_and_sft", (1, 1, 2), model="untied", variant="model"),
    Case(dims=(1, 2), variant="zero3", keys={"zero_optimization": {"stage": 3}}),
    Case(model="untied", variant="lora", keys={"lora": LORA}),
    Case(model="mixtral", variant="lora", keys={"lora": LORA}),
    Case(variant="bf16", keys={"bf16": {"enabled": True}}),
    Case(variant="unpacked", keys={"packing": False}),
    Case(dims=(2, 2), variant="dataset", keys={"packing": "dataset"}),
    Case("orpo", (2, 2), variant="sequence", keys={"sequence": 2}),
    Case("ipo", variant="dualpipev", keys={"schedule": "dualpipev"}),
    Case("simpo", (2, 2), model="gemma2"),
    Case("dpo", (4, 1), model="phi3"),
]
FAULTY = [
    Case("dpo_and_sft", (1, 1), "untied", "lora", {"lora": LORA}, fault=fault)
    for fault in ("", *(name for name in FAULTS if name != same_digest.__name__))  # which caches alone show
]
SLOW = [f"{loss}-tied-1x1" for loss in LOSSES]
SLOW += ["dpo-tied-2x1", "dpo_and_sft-tied-1x2-sequence", "dpo_and_sft-tied-2x2", "dpo_and_sft-tied-2x1-dualpipev"]
SLOW += ["kto-tied-2x2", "kto-tied-1x2-sequence", "kto-tied-2x1-dualpipev"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preferences")


@pytest.fixture(scope="module")
def pairs(folder: Path) -> list[Sample]:
    """Pairs with the same prompt, of which the first third is not trained."""
    generator, made = random.Random(0), list[Sample]()
    for first, second in [(9, 30), (41, 12), (22, 23), (5, 60), (33, 8), (17, 17), (50, 7), (12, 40)]:
        prompt = [generator.randrange(3, 512) for _ in range(min(first, second) // 3)]
        ids, labels = list[int](), list[int]()
        for length in (first, second):
            answer = [generator.randrange(3, 512) for _ in range(length - len(prompt))]
            ids += prompt + answer
            labels += [-100] * len(prompt) + answer
        made.append({"input_ids": ids, "labels": labels, "first": first})
    (folder / "samples.json").write_text(json.dumps(made))
    (folder / "singles.json").write_text(json.dumps(singles(made)))
    return made


def singles(pairs: list[Sample]) -> list[Sample]:
    """The documents of pairs by themselves, the better ones as desirable; one answer is a single token."""
    made: list[Sample] = []
    for pair in pairs:
        for value, its in enumerate((slice(pair["first"], None), slice(0, pair["first"]))):
            made.append({"input_ids": pair["input_ids"][its], "labels": pair["labels"][its], "value": float(value)})
    short = 1 + next(place for place, label in enumerate(made[0]["labels"]) if label != -100)
    made[0]["input_ids"], made[0]["labels"] = made[0]["input_ids"][:short], made[0]["labels"][:short]
    return made


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path]) -> Callable[[Case], tuple[Path, Path, Callable[[], CausalLM]]]:
    """A case's model and its adapter, and what loads both in one process."""

    def get(case: Case) -> tuple[Path, Path, Callable[[], CausalLM]]:
        family, changes = MODELS[case.model]
        model = make_checkpoint(family, **changes)
        if "lora" not in case.keys:
            return model, model, lambda: load_model(model, torch.float32)
        spec = read_spec(model).training(Trained(Lora(**LORA), ()))
        adapter = save_adapter(spec, model)
        states = AdaptedStates(open_source(model, spec.base), spec, PeftFolder(adapter, spec))
        return model, adapter, lambda: CausalLM(spec, states, torch.float32, torch.device("cpu")).eval()

    return get


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks, folder: Path, models: Callable[[Case], Any], pairs: list[Sample], asked: set[str]
) -> dict[str, Outcome]:
    """All cases that this session asks for."""
    del pairs  # already on disk
    chosen = [case for case in (*CASES, *FAULTY) if case.name in asked]
    return take(ranks, [described(case, models(case), folder) for case in chosen], folder)


def described(case: Case, made: tuple[Path, Path, Callable[[], CausalLM]], folder: Path) -> dict[str, Any]:
    model, adapter, _ = made
    keys: dict[str, Any] = {
        "data_path": str(folder / ("singles.json" if case.unpaired else "samples.json")),
        "max_seq_len": LIMIT if case.unpaired else 128,
        "preference": LOSSES[case.loss],
        "train_batch_size": 16 if case.unpaired else 8,
        "pack_len": ROW,
        "aux_router_loss": {"weight": 0.0 if case.model == "mixtral" else None},
    } | case.keys
    if "lora" in keys:
        keys["lora"] = keys["lora"] | {"start_from": str(adapter)}
    kind = "zero" if case.variant == "zero3" else "pipeline"
    return step(case.name, case.dims, model, folder, keys, kind=kind, fault=case.fault)


def paired(model: CausalLM, pairs: list[Sample], case: Case) -> Outcome:
    """One process's outcome, by the formulas."""
    each: list[list[Tensor]] = []
    for pair in pairs:
        documents = slice(0, pair["first"]), slice(pair["first"], None)
        each.append([log_probabilities(model, pair["input_ids"][its], pair["labels"][its]) for its in documents])
    sums = torch.stack([torch.stack([found.sum() for found in documents]) for documents in each])
    lengths = torch.tensor([[len(found) for found in documents] for documents in each])
    reference = sums.detach()
    ratios = sums - torch.from_numpy(shifted(reference.numpy()))
    section = LOSSES[case.loss]
    if case.loss in ("dpo", "dpo_and_sft", "cdpo"):
        margins, smoothing = BETA * (ratios[:, 0] - ratios[:, 1]), section.get("label_smoothing", 0.0)
        losses = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
    elif case.loss == "ipo":
        ratios = ratios / lengths
        losses = (ratios[:, 0] - ratios[:, 1] - 1 / (2 * BETA)) ** 2
    elif case.loss == "simpo":
        means = sums / lengths
        losses = -F.logsigmoid(2.0 * (means[:, 0] - means[:, 1]) - 0.3)
    else:
        odds = torch.special.logit(torch.exp(sums / lengths))
        losses = -BETA * F.logsigmoid(odds[:, 0] - odds[:, 1])
    weight = section.get("sft_weight", 1.0 if case.loss == "orpo" else 0.0)
    loss = losses.mean() - weight * sums[:, 0].sum() / lengths[:, 0].sum()
    return alone(loss, model, reference)


def unpaired(model: CausalLM, samples: list[Sample], case: Case) -> Outcome:
    """One process's outcome, by the formula of KTO."""
    sums = torch.stack([log_probabilities(model, each["input_ids"], each["labels"]).sum() for each in samples])
    reference, kl = torch.stack([sums.detach(), torch.zeros(len(sums))], dim=1), torch.tensor(0.0)
    if case.loss == "kto":
        prompts = [each["labels"].count(-100) for each in samples]
        cut = 0
        for place, partner in enumerate(Mismatched(InMemory(samples), LIMIT).partners.tolist()):
            answer = samples[partner]["input_ids"][prompts[partner] :]
            ids = samples[place]["input_ids"][: prompts[place]] + answer
            labels = [-100] * prompts[place] + answer
            cut += len(ids) > LIMIT
            reference[place, 1] = log_probabilities(model, ids[:LIMIT], labels[:LIMIT]).sum().detach()
        assert cut
        kl = (reference - torch.from_numpy(shifted(reference.numpy())) + 1)[:, 1].mean()
        assert kl > 0.5
    ratios = sums - torch.from_numpy(shifted(reference.numpy()))[:, 0]
    good = torch.tensor([each["value"] == 1 for each in samples])
    desirable = 1 - torch.sigmoid(BETA * (ratios - kl))
    undesirable = 1 - torch.sigmoid(BETA * (kl - ratios))
    weights = (1.5, 0.7) if case.loss == "kto" else (1.0, 1.0)
    loss = torch.where(good, weights[0] * desirable, weights[1] * undesirable).mean()
    return alone(loss, model, reference)


def log_probabilities(model: CausalLM, ids: list[int], labels: list[int]) -> Tensor:
    hidden = model.activations(torch.tensor([ids]))[0]
    logits = model.head.project(model.head.norm(hidden))[0, :-1]
    targets = torch.tensor(labels[1:])
    found = F.log_softmax(logits, dim=-1).gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
    return found[targets >= 0]


@pytest.mark.parametrize("case", tiered(CASES, ["kto-tied-2x1"], SLOW))
def test_every_gradient_of_preferences_equals_one_process(
    case: Case, outcomes: dict[str, Outcome], models: Callable[[Case], Any], pairs: list[Sample]
) -> None:
    model = models(case)[2]()
    expected = unpaired(model, singles(pairs), case) if case.unpaired else paired(model, pairs, case)
    assert_equal(expected, outcomes[case.name], case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTY, ids=lambda case: case.name)
def test_a_fault_of_preferences_is_seen(
    case: Case, outcomes: dict[str, Outcome], models: Callable[[Case], Any], pairs: list[Sample]
) -> None:
    """The comparison that holds without a fault fails with each of them."""
    expected = paired(models(case)[2](), pairs, case)
    if not case.fault:
        assert_equal(expected, outcomes[case.name], case)
        return
    with pytest.raises(AssertionError):
        assert_equal(expected, outcomes[case.name], case)


def assert_equal(expected: Outcome, found: Outcome, case: Case) -> None:
    assert found.reference.numel() == 0 or numpy.ptp(expected.reference.numpy()) > 1
    if case.loss in ("simpo", "orpo"):
        assert found.reference.numel() == 0
    else:
        assert_near(found.reference, expected.reference, case.dtype)
    if case.variant == "model":  # whose processes have parts of the gradients
        found = found._replace(gradients=expected.gradients)
    assert_same(found, expected, case.dtype, apart=case.dims[0] > 1 and case.variant != "dualpipev")

"""Evaluations and searches for bad records, with every objective, on a model in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.loader import GlobalBatch, Loader
from data.sample_set import InMemory, Sample, documents
from models import load_model
from models.causal_lm import CausalLM
from models.parallel.groups import NO_GROUPS
from options import RunConfig
from options.distillation.collation import taught
from options.preference.collation import JudgedCollation, judged
from options.preference.reference import estimate_kl, log_probabilities, mismatched_loader
from tests.models.test_scores import save_scoring
from training.bad_steps import find_cause
from training.batches import build_loader
from training.evaluation import Evaluation
from training.measures import measures_of

pytestmark = pytest.mark.usefixtures("group")

BETA, TOP_K = 0.3, 5
OBJECTIVES: dict[str, dict[str, Any]] = {
    "words": {},
    "words and z-loss": {"aux_max_z_loss": {"weight": 0.1}},
    "router": {"aux_router_loss": {"weight": 0.5}},
    "distillation": {"distillation": {"teacher": "t", "top_k": TOP_K, "weight": 0.4}},
    "dpo": {"preference": {"loss": "dpo", "beta": BETA}},
    "dpo and sft": {"preference": {"loss": "dpo", "beta": BETA, "sft_weight": 0.5}},
    "cdpo, normalised, and sft": {
        "preference": {"loss": "cdpo", "label_smoothing": 0.2, "length_normalised": True, "sft_weight": 2.0}
    },
    "ipo": {"preference": {"loss": "ipo", "beta": BETA}},
    "simpo and sft": {"preference": {"loss": "simpo", "beta": 2.0, "gamma": 0.4, "sft_weight": 0.3}},
    "orpo": {"preference": {"loss": "orpo", "beta": BETA}},
    "kto": {"preference": {"loss": "kto", "beta": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.8}},
    "apo": {"preference": {"loss": "apo_zero_unpaired", "beta": BETA}},
    "reward": {"preference": {"loss": "reward", "center_weight": 0.1}},
    "classes": {"labels": ["a", "b", "c"]},
}
WITH_SFT = [name for name, keys in OBJECTIVES.items() if "sft" in name or name == "orpo"]
ALONE = ("kto", "apo", "classes")


class OneProcess:
    """What an evaluation asks of a trainer, with a whole model."""

    groups, row_replica = NO_GROUPS, 0

    def __init__(self, model: CausalLM, config: RunConfig) -> None:
        router_loss_weight = config.aux_router_loss.weight or 0.0
        self._model, self.loss = model, config.objective.loss(router_loss_weight)
        module = SimpleNamespace(micro_batch_loss=self.loss)
        self.engine = SimpleNamespace(device=torch.device("cpu"), module=module)

    def _loss(self, labels: tuple[Tensor, ...], activations: Any) -> Tensor:
        return self.loss(self._model.head, activations, labels)

    @torch.no_grad()
    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        losses, head = [], self._model.head
        for (input_ids, position_ids), labels in loader.tensors(batch, 0):
            losses.append(head(self._model.activations(input_ids, position_ids), loss=partial(self._loss, labels)))
        return float(torch.stack(losses).mean())


def config_of(name: str, size: int, **more: Any) -> RunConfig:
    keys = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": size, "max_seq_len": 128}
    return RunConfig.model_validate(keys | {"optimizer": {"params": {"lr": 1e-3}}} | OBJECTIVES[name] | more)


def make_samples(name: str, count: int = 8) -> list[Sample]:
    """Make documents, or pairs, of unequal lengths, a part of which is trained."""
    generator = torch.Generator().manual_seed(0)
    made: list[Sample] = []
    for number in range(2 * count):
        ids = torch.randint(3, 512, (4 + number * number % 23,), generator=generator).tolist()
        made.append(
            {"input_ids": ids, "labels": [-100] * 2 + ids[2:], "value": float(number % (2 + (name == "classes")))}
        )
    if name in ALONE or "preference" not in OBJECTIVES[name]:
        return made[:count]
    return [
        {
            "input_ids": one["input_ids"] + two["input_ids"],
            "labels": one["labels"] + two["labels"],
            "first": len(one["input_ids"]),
            "value": 0.5,
        }
        for one, two in zip(made[::2], made[1::2], strict=True)
    ]


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    words = make_checkpoint("llama", initializer_range=0.3)
    folders = {
        "words": words,
        "router": make_checkpoint("mixtral", num_local_experts=4, num_experts_per_tok=2),
        "reward": save_scoring(tmp_path_factory.mktemp("reward"), "llama", 1),
        "classes": save_scoring(tmp_path_factory.mktemp("classes"), "llama", 3),
    }
    return {name: load_model(folder, torch.float32) for name, folder in folders.items()}


def reference_of(samples: Sequence[Sample], documents_each: int) -> NDArray[numpy.float32]:
    generator = numpy.random.default_rng(1)
    return generator.uniform(-60, -20, (len(samples), documents_each)).astype(numpy.float32)


def prepared(
    name: str, models: dict[str, CausalLM], size: int, kinds: int = 1, **more: Any
) -> tuple[OneProcess, Evaluation]:
    config, samples = config_of(name, size, **more), make_samples(name)
    trainer = OneProcess(models.get(name, models["words"]), config)
    numbers = {f"kind {kind}": list(range(len(samples)))[kind::kinds] for kind in range(kinds)}
    data = InMemory(samples)
    loaders = {kind: build_loader(data, config, numbers=its) for kind, its in numbers.items()}
    mismatched = mismatched_loader(data, config) if name == "kto" else None
    if mismatched:
        gained = [[3.0 - number * number % 7] for number in range(len(samples))]  # of either sign
        judged(mismatched).reference = log_probabilities(trainer, mismatched)[:, :1] - numpy.array(gained, "f4")  # type: ignore[arg-type]
    for loader in loaders.values():
        if isinstance(known := loader.collation, JudgedCollation):
            known.reference, known.mismatched = reference_of(samples, 2), mismatched
    evaluation = Evaluation(loaders, config, 1, active=False)
    if name == "kto":
        evaluation.before = estimate_kl
    return trainer, evaluation


def evaluated(name: str, models: dict[str, CausalLM], size: int, kinds: int = 1, **more: Any) -> dict[str, float]:
    trainer, evaluation = prepared(name, models, size, kinds, **more)
    found = evaluation.run(trainer, lambda _: None, lambda: False)  # type: ignore[arg-type]
    assert found is not None
    return found | (measures_of(trainer) if config_of(name, 1).objective.wanted else {})  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", ["batch", False, "dataset"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_an_evaluation_finds_does_not_depend_on_its_batches(
    name: str, packing: Any, models: dict[str, CausalLM]
) -> None:
    keys = {"packing": packing} | ({"pack_len": 64} if packing == "dataset" else {})
    expected = evaluated(name, models, 8, **keys)
    for size in (1, 2, 4, 5):
        assert evaluated(name, models, size, **keys) == pytest.approx(expected, rel=1e-5, abs=1e-6), size


@pytest.mark.parametrize("name", ["words", "dpo", "kto", *WITH_SFT])
def test_several_types_of_records_make_the_same_whole(name: str, models: dict[str, CausalLM]) -> None:
    expected = evaluated(name, models, 8)["eval_loss"]
    for size in (1, 3, 8):
        found = evaluated(name, models, size, kinds=3)
        assert found["eval_loss"] == pytest.approx(expected, rel=1e-5), size
        assert {"eval_loss/kind 0", "eval_loss/kind 2"} <= found.keys()


@pytest.mark.parametrize("name", WITH_SFT)
def test_the_cross_entropy_is_a_mean_over_the_tokens_of_the_set(name: str, models: dict[str, CausalLM]) -> None:
    weight = config_of(name, 8).preference.objective["sft_weight"]  # type: ignore[union-attr]
    without = dict(OBJECTIVES[name]["preference"]) | {"sft_weight": 0.0}
    plain = evaluated(name, models, 2, preference=without)["eval_loss"]
    total, tokens = torch.zeros(()), 0
    for sample in make_samples(name):
        better = documents(sample)[0]
        logits = models["words"](torch.tensor([better["input_ids"]]))[0, :-1].detach()
        labels = torch.tensor(better["labels"][1:])
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        tokens += int((labels >= 0).sum())
    assert evaluated(name, models, 2)["eval_loss"] == pytest.approx(plain + weight * float(total) / tokens, rel=1e-5)


def run_of(name: str, trainer: OneProcess, loader: Loader) -> Any:
    """What a search for bad records asks of a run, whose labels come with what the objective needs beside them."""
    if name == "distillation":
        tokens = int(loader.data.supervised.sum())
        words = numpy.tile(numpy.arange(TOP_K, dtype=numpy.int32), (tokens, 1))
        taught(loader).known = numpy.stack(
            [words, numpy.full((tokens, TOP_K), -2.0, numpy.float32).view(numpy.int32)], axis=1
        )
    progress = SimpleNamespace(log=SimpleNamespace(quiet=True))
    return SimpleNamespace(
        trainer=trainer, loader=loader, mark=lambda _: None, progress=progress, origin=lambda number: f"record {number}"
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_spoils_a_step_is_looked_for_with_every_objective(name: str, models: dict[str, CausalLM]) -> None:
    """In all records, in one of them, and in none."""
    trainer, evaluation = prepared(name, models, 8)
    (loader,) = evaluation.loaders.values()
    run, (batch, samples) = run_of(name, trainer, loader), (loader.batch(0), loader.data.samples)
    assert "expected a lower learning rate or fp32" in find_cause(run, batch)
    embedding = models.get(name, models["words"]).embedding.embed_tokens.weight.data
    before, own = embedding.clone(), set(samples[3]["input_ids"])
    (bad, *_) = own.difference(*(sample["input_ids"] for number, sample in enumerate(samples) if number != 3))
    embedding[bad] = math.nan
    assert find_cause(run, batch) == "no finite loss from record 3"
    embedding.fill_(math.nan)
    assert find_cause(run, batch).endswith("the weights are spoilt, or the learning rate is too high")
    embedding.copy_(before)


def test_a_record_of_which_the_teacher_says_nothing_finite_is_named(models: dict[str, CausalLM]) -> None:
    trainer, evaluation = prepared("distillation", models, 8)
    (loader,) = evaluation.loaders.values()
    run = run_of("distillation", trainer, loader)
    first = taught(loader).first_tokens[5]
    taught(loader).known[first : first + 1, 1] = numpy.array([math.nan], numpy.float32).view(numpy.int32)
    assert find_cause(run, loader.batch(0)) == "no finite loss from record 5"

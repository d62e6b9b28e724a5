"""An objective of one's own, which no file of the core knows, is trained over stages as one process trains it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from data.sample_set import Sample
from models import load_model
from models.causal_lm import CausalLM
from tests.closeness import assert_near
from tests.launching import metrics, topology, write_config
from tests.ranks import Ranks, samples_of
from tests.workers.own_objective import WithSlanted, counts, shifts
from training.config.keys import TrainConfig
from training.option import Option

STEPS, LR = 3, 0.2
LENGTHS = (9, 40, 17, 5, 31, 22, 12, 27)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return samples_of(LENGTHS)


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", tie_word_embeddings=True)


def write_run(folder: Path, name: str, model: Path, samples: list[Sample], **keys: Any) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in samples))
    records = [{"path": str(path), "format": "tokens"}]
    given: dict[str, Any] = {"data_path": records, "eval_data_path": records, "eval_at_start": True, "pack_len": 64}
    given |= {"model_path": str(model), "max_seq_len": 64, "max_steps": STEPS, "gradient_clipping": 0.0}
    given |= {"optimizer": {"type": "SGD", "params": {"lr": LR}}, "cache_dir": str(folder / "cache")}
    return write_config(folder / f"{name}.yml", **given, **keys)


def alone(model: CausalLM, samples: list[Sample]) -> list[float]:
    """The losses of a process that updates by SGD, and the last one after all steps."""
    found: list[float] = []
    for _ in range(STEPS + 1):
        total, tokens = torch.zeros(()), 0
        for sample in samples:
            places, ids = torch.arange(len(sample["input_ids"])), torch.tensor([sample["input_ids"]])

            def shifted(_: Any, __: Any, output: tuple[Tensor, ...], places: Tensor = places) -> tuple[Tensor, ...]:
                return output[0] + shifts(places)[None, :, None], *output[1:]

            with model.embedding.register_forward_hook(shifted):
                logits = model(ids)[0]
            each = F.cross_entropy(logits[:-1], torch.tensor(sample["labels"][1:]), reduction="none")
            total = total + (counts(places[:-1]) * each).sum()
            tokens += sum(label != -100 for label in sample["labels"][1:])
        loss = total / tokens
        found.append(loss.item())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight.sub_(LR * weight.grad)
    return found


@pytest.mark.launched
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("pipeline", {"model_topo": topology((2, 1), [3, 2])}),
        pytest.param("pipeline", {"model_topo": topology((1, 2)) | {"sequence": 2}}, marks=pytest.mark.slow),
        pytest.param("pipeline", {"model_topo": topology((2, 1)), "schedule": "dualpipev"}, marks=pytest.mark.longest),
        pytest.param("zero", {"model_topo": topology((1, 2))}, marks=pytest.mark.longest),
    ],
    ids=["stages", "sequence", "dualpipev", "zero"],
)
def test_it_is_trained_as_one_process_does(
    kind: str, keys: dict[str, Any], model: Path, samples: list[Sample], ranks: Ranks, tmp_path: Path
) -> None:
    """From records to the metrics, evaluations too."""
    path = write_run(tmp_path, "own", model, samples, **keys)
    case = {"name": "own", "kind": kind, "config": yaml.safe_load(path.read_text()), "events": {}}
    ranks.run(2, "own_objective", [case], tmp_path)
    assert json.loads(path.with_suffix(".json").read_text())["error"] is None
    lines = metrics(tmp_path / "own")
    steps, evaluations = ([line for line in lines if name in line] for name in ("loss", "eval_loss"))
    expected = alone(load_model(model, torch.float32), samples)
    assert_near(torch.tensor([line["loss"] for line in steps]), torch.tensor(expected[:-1]), kind="means")
    ends = [evaluations[0]["eval_loss"], evaluations[-1]["eval_loss"]]
    assert_near(torch.tensor(ends), torch.tensor([expected[0], expected[-1]]), kind="means")
    assert expected[-1] < expected[0]
    trained = [
        float(counts(torch.tensor(place)))
        for sample in samples
        for place, label in enumerate(sample["labels"][1:])
        if label != -100
    ]
    assert [line["count"] for line in steps] == pytest.approx(STEPS * [sum(trained) / len(trained)])
    assert "eval_perplexity" not in evaluations[0] and "eval_count" in evaluations[0]


class AnotherKeys(TrainConfig):
    """A run that another key asks for another objective, too."""

    another: bool = True


class WithAnother(AnotherKeys, WithSlanted):
    options = (*WithSlanted.options, Option(AnotherKeys, before="freeze", objective_key="another"))


def test_a_key_of_it_goes_with_no_other_objective() -> None:
    keys: dict[str, Any] = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8, "slope": 0.5}
    assert WithSlanted.model_validate(keys).objective_keys == ["slope"]
    with pytest.raises(ValueError, match="slope and another: each has a loss of its own; expected one of them"):
        WithAnother.model_validate(keys)
